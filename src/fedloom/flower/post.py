"""Messages out, replies in: over Flower's public Grid, one reply at a time."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedloom.errors import RunError
from fedloom.flower.wire import brief

LOG = logging.getLogger("fedloom")
SHORTEST, LONGEST = 0.05, 1.0  # seconds between two looks for replies
NODE_UNAVAILABLE = 5


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
        return list(self.grid.get_node_ids())

    def send(self, contents: Iterable[tuple[int, RecordDict]], kind: str, patience: float) -> list[str | None]:
        """Push messages, each a (node, content); the id of each, or None where it could not be pushed."""
        messages = [Message(content, node, kind, ttl=patience) for node, content in contents]
        if not messages:
            return []
        ids = list(self.grid.push_messages(messages))
        if len(ids) != len(messages):
            raise RunError(f"Flower took {len(ids)} of {len(messages)} messages; is the model too large for its wire?")
        for message, id in zip(messages, ids, strict=True):
            if id:
                self.out[id] = Sent(message.metadata.dst_node_id, time.monotonic())
        self._pause = SHORTEST
        return [id or None for id in ids]

    def look(self, ids: Iterable[str]) -> dict[str, RecordDict | str]:
        """The replies that have come, or why there will be none."""
        found: dict[str, RecordDict | str] = {}
        for id in list(ids):
            try:
                replies = list(self.grid.pull_messages([id]))
            except Exception as error:  # what a node has put together by hand may fail anywhere
                if type(error).__module__.partition(".")[0] == "httpx":
                    raise RunError(f"the SuperLink can't be reached: {brief(error)}") from None
                found[id] = f"its reply can't be read ({brief(error)})"
                continue
            for reply in replies[:1]:
                found[id] = self._content(id, reply)
        for id in found:
            del self.out[id]
        if found:
            self._pause = SHORTEST
        return found

    def _content(self, id: str, reply: Message) -> RecordDict | str:
        if reply.has_error():
            code, reason = reply.error.code, brief(reply.error.reason or "")
            return f"it is not there: {reason}" if code == NODE_UNAVAILABLE else f"it failed: {reason}"
        if reply.metadata.src_node_id != self.out[id].node or reply.metadata.reply_to_message_id != id:
            return "its reply belongs to another message"
        refusal = reply.content.get("refusal")
        if refusal is not None:
            return f"it refused: {brief(refusal.get('why', '') if isinstance(refusal, Mapping) else '')}"
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
        self, ids: Iterable[str], patience: float, take: Callable[[str, RecordDict | str], None], enough: int = 1 << 62
    ) -> list[str]:
        """Hand over every reply as it comes, until all are here or patience ends; those that never came."""
        missing, deadline, came = list(ids), time.monotonic() + patience, 0
        while missing:
            for id, content in self.look(missing).items():
                missing.remove(id)
                take(id, content)
                came += 1
            if not missing or came >= enough or time.monotonic() > deadline:
                break
            self.pause()
        return missing

    def exchange(self, contents: Mapping[int, RecordDict], kind: str, patience: float) -> dict[int, Any]:
        """Ask nodes, and wait for all answers: a content, or why there is none."""
        ids = dict(zip(self.send(contents.items(), kind, patience), contents, strict=True))
        answers: dict[int, Any] = {}

        def take(id: str, content: RecordDict | str) -> None:
            answers[ids[id]] = content

        self.forget(self.gather([id for id in ids if id], patience, take))
        return answers
