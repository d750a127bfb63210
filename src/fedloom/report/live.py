"""The live page: `fedloom ui` watches a folder of runs and tells every open page what changed."""

import asyncio
import errno
import ipaddress
import socket
import threading
import webbrowser
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from fedloom.errors import ConfigError, RunError
from fedloom.report.hub import Hub
from fedloom.report.page import live_page
from fedloom.report.watch import Watch

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class Guard:
    """Refuses what no page of ours asks for: other verbs, and on a loopback address other names, since any web site can
    let its own name point there.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], names: frozenset[str] | None) -> None:
        self.app, self.names = app, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.responses import PlainTextResponse

        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        elif scope["method"] != "GET":
            refused = PlainTextResponse("only GET is answered\n", 405, {**HEADERS, "Allow": "GET"})
            await refused(scope, receive, send)
        elif self.names is not None and _hosts(scope) - self.names:
            await PlainTextResponse("this page is served under localhost only\n", 403, HEADERS)(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def _hosts(scope: Scope) -> set[str]:
    """The names that a request gives for this server, without ports; an empty one where it gives none."""
    given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"] or [""]
    return {
        host[: host.index("]") + 1] if "]" in host else host.rpartition(":")[0] or host
        for host in map(str.lower, given)
    }


def make_app(hub: Hub, title: str, names: frozenset[str] | None) -> Guard:
    """Two fixed addresses, / and /events. Nothing of a request ever names a file."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, Response, StreamingResponse
    from starlette.routing import Route

    page = live_page(title)

    async def show(_: Request) -> Response:
        return HTMLResponse(page, headers=HEADERS)

    async def events(_: Request) -> Response:
        return StreamingResponse(hub.events(), media_type="text/event-stream", headers=HEADERS)

    @asynccontextmanager
    async def following(_: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(hub.follow())
        yield
        task.cancel()

    app = Starlette(routes=[Route("/", show), Route("/events", events)], lifespan=following)
    app.router.redirect_slashes = False  # it would answer with an address made of the request's own
    return Guard(app, names)


def serve(root: Path, host: str, port: int, *, say: Callable[[str], None], show: bool = False) -> None:
    """Serve the live page until interrupted."""
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ModuleNotFoundError as error:
        raise ConfigError(f"the live page needs {error.name}: pip install 'fedloom[ui]'") from None
    if root.exists() and not root.is_dir():
        raise ConfigError(f"{root} is a file; name a folder of runs")
    listening, names = _listen(host, port)
    if names is None:
        say(
            f"warning: everyone who can reach {host} can read these runs; leave --host out to keep them to this machine"
        )
    if not root.exists():
        say(f"there is no {root} yet; runs will appear when it is there")
    hub = Hub(Watch(root.resolve()))

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)
            address = f"http://{_shown(host)}:{listening.getsockname()[1]}/"
            say(f"live page of {root}: {address} (Ctrl-C ends it)")
            if show:
                threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            super().handle_exit(sig, frame)
            asyncio.get_running_loop().call_soon_threadsafe(hub.close)

    config = uvicorn.Config(
        make_app(hub, f"Runs in {root}", names),
        log_config=None,
        log_level="critical",
        access_log=False,
        lifespan="on",
        loop="asyncio",  # the same server whatever else is installed
        http="h11",
        proxy_headers=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=1,
    )
    try:
        Server(config).run(sockets=[listening])
    except KeyboardInterrupt:  # how uvicorn ends after it has closed everything
        say("ended")


def _listen(host: str, port: int) -> tuple[socket.socket, frozenset[str] | None]:
    """A socket, and the names that requests may use if it is for this machine alone."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError, OverflowError):
        raise ConfigError(f"--host {host} --port {port} is no address; leave --host out for 127.0.0.1") from None
    listening = socket.socket(family, kind, protocol)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
    except OSError as error:
        listening.close()
        why = (
            "is in use; choose another --port"
            if error.errno == errno.EADDRINUSE
            else f"can't be used: {error.strerror}"
        )
        raise RunError(f"port {port} of {host} {why}") from None
    loopback = ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback
    return listening, frozenset({"localhost", "127.0.0.1", "[::1]", _shown(host.lower())}) if loopback else None


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
