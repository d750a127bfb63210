"""Who is told what: pages that go, pages that are slow, and the end."""

import asyncio
from pathlib import Path

import pytest

from fedloom.report.hub import BEHIND, Hub
from fedloom.report.live import make_app
from fedloom.report.watch import Watch
from tests.report.test_watch import make_run

uvicorn = pytest.importorskip("uvicorn", reason="needs the extra ui")
pytest.importorskip("starlette", reason="needs the extra ui")


def test_a_page_that_goes_is_let_go_and_a_slow_one_is_cut_off(tmp_path: Path) -> None:
    make_run(tmp_path / "run")

    async def play() -> None:
        hub = Hub(Watch(tmp_path))
        gone, slow, quick = hub.events(), hub.events(), hub.events()
        for page in (gone, slow, quick):
            assert (await anext(page)).startswith("retry: 1000\nevent: snapshot\n")
        await gone.aclose()  # type: ignore[attr-defined]
        assert len(hub._pages) == 2
        for i in range(BEHIND + 1):
            hub._tell(f"{i}")
            assert await anext(quick) == f"{i}"
        assert len(hub._pages) == 1
        assert [event async for event in slow] == [f"{i}" for i in range(BEHIND)]  # then it ends
        hub.close()
        assert [event async for event in quick] == []

    asyncio.run(play())


def test_a_closed_connection_is_noticed(tmp_path: Path) -> None:
    """By the server, not only by the next heartbeat."""
    hub = Hub(Watch(tmp_path))
    config = uvicorn.Config(make_app(hub, "t", None), port=0, log_level="critical", ws="none", lifespan="off")
    server = uvicorn.Server(config)

    async def play() -> None:
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b"event: snapshot")
        assert len(hub._pages) == 1
        writer.close()
        for _ in range(100):
            await asyncio.sleep(0.02)
            if not hub._pages:
                break
        assert not hub._pages
        server.should_exit = True
        await serving

    asyncio.run(play())
