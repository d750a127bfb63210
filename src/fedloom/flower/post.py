"""Messages out, replies in: over Flower's public Grid, one reply at a time."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedloom.errors import RunError
from fedloom.flower.wire import brief

SHORTEST, LONGEST = 0.05, 1.0  # seconds between two looks for replies
NODE_UNAVAILABLE = 5  # the code of Flower's errors
Returned = TypeVar("Returned")


@dataclass(frozen=True)
class Failed:
    """A reply that holds no answer."""

    why: str


class Absent(Failed):
    """Its node is gone."""


@dataclass(frozen=True)
class Sent:
    """A message that is out."""

    node: int
    at: float


@dataclass
class Post:
    """The server's post office.

    Replies are fetched one by one: one that can't be read then costs nobody else's. They are looked for more often
    than Flower's own loop does (every 3 s), and less often the longer nothing comes.
    """

    grid: Grid
    out: dict[str, Sent] = field(default_factory=dict)
    _pause: float = SHORTEST

    def connected(self) -> list[int]:
        return list(_reaching(self.grid.get_node_ids))

    def send(self, contents: Iterable[tuple[int, RecordDict]], kind: str, patience: float) -> list[str | None]:
        """Push messages, each a (node, content); the id of each, or None where it could not be pushed."""
        messages = [Message(content, node, kind, ttl=patience) for node, content in contents]
        if not messages:
            return []
        nodes = [message.metadata.dst_node_id for message in messages]
        ids = list(_reaching(self.grid.push_messages, messages))
        if len(ids) != len(nodes):
            raise RunError(f"Flower took {len(ids)} of {len(nodes)} messages; is the model too large for its wire?")
        self.out |= {id: Sent(node, time.monotonic()) for id, node in zip(ids, nodes, strict=True) if id}
        self._pause = SHORTEST
        return [id or None for id in ids]

    def look(self, ids: Iterable[str]) -> dict[str, RecordDict | Failed]:
        """The replies that have come, or why there will be none."""
        found: dict[str, RecordDict | Failed] = {}
        for id in list(ids):
            try:
                replies = list(_reaching(self.grid.pull_messages, [id]))
            except RunError:
                raise
            except Exception as error:  # what a node has put together by hand may fail anywhere
                found[id] = Failed(f"its reply can't be read ({brief(error)})")
                continue
            for reply in replies[:1]:
                found[id] = self._content(id, reply)
        for id in found:
            del self.out[id]
        if found:
            self._pause = SHORTEST
        return found

    def _content(self, id: str, reply: Message) -> RecordDict | Failed:
        if reply.has_error():
            code, reason = reply.error.code, brief(reply.error.reason or "")
            return Absent(f"it is gone: {reason}") if code == NODE_UNAVAILABLE else Failed(f"it failed: {reason}")
        if reply.metadata.src_node_id != self.out[id].node or reply.metadata.reply_to_message_id != id:
            return Failed("its reply belongs to another message")
        refusal = reply.content.get("refusal")
        if refusal is not None:
            return Failed(f"it refused: {brief(refusal.get('why', '') if isinstance(refusal, Mapping) else '')}")
        content: RecordDict = reply.content
        return content

    def pause(self) -> None:
        time.sleep(self._pause)
        self._pause = min(LONGEST, 1.2 * self._pause)

    def forget(self, ids: Iterable[str]) -> None:
        """Replies that come now come too late."""
        for id in ids:
            self.out.pop(id, None)

    def gather(
        self, ids: Iterable[str], patience: float, take: Callable[[str, RecordDict | Failed], None]
    ) -> list[str]:
        """Hand over every reply as it comes, until all are here or patience ends; those that never came."""
        missing, deadline = list(ids), time.monotonic() + patience
        while missing:
            for id, content in self.look(missing).items():
                missing.remove(id)
                take(id, content)
            if not missing or time.monotonic() > deadline:
                break
            self.pause()
        self.forget(missing)
        return missing


def _reaching(call: Callable[..., Returned], *arguments: Any) -> Returned:
    """Flower tries again for a while by itself; then a SuperLink that is gone ends the run, which can be resumed."""
    try:
        return call(*arguments)
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "httpx":
            raise
        raise RunError(f"the SuperLink can't be reached: {brief(error)}") from None
