"""Who takes part: which node of a Flower federation is which client, and how many samples it has.

Node ids come from keys and say nothing of an order, so a client's number is the `partition-id` of its node's config;
nodes without one get the numbers that are left, in the order of their ids. The roster is fixed when a run begins and
lies in the run's folder: a server that is resumed knows its clients before they are back.
"""

import json
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from flwr.app import RecordDict
from torch import Tensor

from fedloom.errors import RunError
from fedloom.experiment.folder import write_text
from fedloom.flower.post import Absent, Failed, Post
from fedloom.flower.wire import PROTOCOL, QUERY, Refused, plain_record, read_fields, run_name
from fedloom.untrusted import read_bytes

LOG = logging.getLogger("fedloom")
ROSTER = "roster.json"
LARGEST = 64 << 20  # bytes of a roster
MOST_SAMPLES = 1 << 40
PATIENCE = 3600.0  # seconds that a node may take to introduce itself: it may have to fetch its data first


@dataclass(frozen=True)
class Member:
    """A client."""

    node: int
    samples: int


@dataclass
class Roster:
    """The clients of a run."""

    run: str
    session: int  # how often a server has begun or resumed it
    members: list[Member]

    @property
    def sizes(self) -> Tensor:
        return torch.tensor([member.samples for member in self.members], dtype=torch.int64)

    def save(self, folder: Path) -> None:
        members = [asdict(member) for member in self.members]
        write_text(folder / ROSTER, json.dumps({"run": self.run, "session": self.session, "clients": members}))

    @classmethod
    def load(cls, folder: Path) -> "Roster | None":
        """That of a run which goes on, one session later."""
        path = folder / ROSTER
        try:
            known = json.loads(read_bytes(path, LARGEST, links=False))
            members = [Member(one["node"], one["samples"]) for one in known["clients"]]
            run, session = known["run"], known["session"]
            counts = [session, *(n for member in members for n in (member.node, member.samples))]
            if not run_name(run) or not members or not all(type(n) is int and n >= 0 for n in counts):
                raise ValueError("it is no roster")
            return cls(run, session + 1, members)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise RunError(f"{path} can't be read: {error}") from None


class Introduced(NamedTuple):
    """What a node says of itself."""

    partition: int  # -1: it has no number
    samples: int


class Registrar:
    """Asks nodes who they are, each once; nobody waits for a node that is slow to answer."""

    def __init__(self, post: Post, digest: str, local: str, max_samples: int | None) -> None:
        self.post = post
        self.digest = digest  # of the model
        self.local = local  # settings that the clients are to train by
        self.max_samples = max_samples
        self.known: dict[int, Introduced | None] = {}  # by node; None: it can't take part
        self.asked: dict[str, int] = {}  # messages that are out, and their nodes

    def enrol(self, clients: int, patience: float) -> Roster:
        """Wait until so many clients have introduced themselves."""
        deadline = time.monotonic() + patience
        found: dict[int, Introduced] = {}
        told = -1
        while True:
            for node in self.listen():
                introduced = self.known[node]
                if introduced is None:
                    continue
                why = _misplaced(introduced.partition, clients, found)
                if why:
                    LOG.warning("node %d is left out: %s", node, why)
                elif len(found) < clients:
                    found[node] = introduced
            if len(found) == clients:
                return Roster(secrets.token_hex(16), 1, _numbered(found, clients))
            if len(found) != told:
                told = len(found)
                LOG.info("%d of %d clients are here; waiting for the others", told, clients)
            if time.monotonic() > deadline:
                raise RunError(
                    f"only {len(found)} of {clients} clients introduced themselves within {patience:g} s; start the "
                    "others, or lower `clients`"
                )
            self.post.pause()

    def welcome_back(self, roster: Roster, missing: Sequence[int]) -> None:
        """Let nodes that nobody knows take the places of clients whose own node is gone, if they have their number and
        as many samples: a SuperNode without a registered key gets a new id with every start.
        """
        self.listen()
        there, members = set(self.post.connected()), {member.node for member in roster.members}
        for node, introduced in self.known.items():
            if introduced is None or node in members or node not in there or introduced.partition not in missing:
                continue
            client = introduced.partition
            if introduced.samples == roster.members[client].samples and roster.members[client].node not in there:
                LOG.warning("client %d is back as node %d", client, node)
                roster.members[client] = replace(roster.members[client], node=node)

    def listen(self) -> list[int]:
        """Ask nodes that are new, and hear whoever has answered since: their ids."""
        there = set(self.post.connected())
        for node in [node for node, found in self.known.items() if found is None and node not in there]:
            del self.known[node]  # when it is back, it may have been mended
        new = sorted(there - set(self.known) - set(self.asked.values()))
        question = {"protocol": PROTOCOL, "local": self.local}
        contents = [(node, RecordDict({"question": plain_record(question)})) for node in new]
        ids = self.post.send(contents, QUERY, PATIENCE)
        self.asked |= {id: node for id, node in zip(ids, new, strict=True) if id is not None}
        heard = []
        for id, answer in self.post.look(self.asked).items():
            node = self.asked.pop(id)
            if isinstance(answer, Absent):
                continue  # to be asked again when it is back
            self.known[node] = self._introduced(node, answer)
            heard.append(node)
        return heard

    def _introduced(self, node: int, answer: RecordDict | Failed) -> Introduced | None:
        kinds = {"protocol": int, "samples": int, "partition": int, "digest": str}
        try:
            if isinstance(answer, Failed):
                raise Refused(answer.why)
            found = read_fields(answer, "introduction", kinds)
            if found["digest"] != self.digest:
                raise Refused("it has another model than the server")
            if not 0 < found["samples"] <= (self.max_samples or MOST_SAMPLES):
                raise Refused(f"it says that it has {found['samples']} samples")
        except Refused as error:
            LOG.warning("node %d is left out: %s", node, error)
            return None
        return Introduced(found["partition"], found["samples"])


def _misplaced(partition: int, clients: int, found: Mapping[int, Introduced]) -> str:
    if partition >= clients:
        return f"its partition-id is {partition}, but there are {clients} clients"
    taken = [node for node, other in found.items() if other.partition == partition >= 0]
    return f"node {taken[0]} has its partition-id, {partition}, already" if taken else ""


def _numbered(found: Mapping[int, Introduced], clients: int) -> list[Member]:
    placed = {introduced.partition: node for node, introduced in found.items() if introduced.partition >= 0}
    free = iter(sorted(set(range(clients)) - set(placed)))
    placed |= {next(free): node for node in sorted(found) if found[node].partition < 0}
    return [Member(placed[client], found[placed[client]].samples) for client in range(clients)]
