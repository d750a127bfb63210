"""Who takes part: which node of a Flower federation is which client, and how many samples it has.

Node ids come from keys and say nothing of an order, so a client's number is the `partition-id` of its node's config;
nodes without one get the numbers that are left, in the order of their ids. The roster is fixed when a run begins and
lies in the run's folder: a server that is resumed knows its clients before they are back.
"""

import json
import logging
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, RecordDict
from torch import Tensor

from fedloom.errors import RunError
from fedloom.experiment.folder import write_text
from fedloom.flower.post import Post
from fedloom.flower.wire import PROTOCOL, QUERY, Refused, read_fields, run_name
from fedloom.untrusted import read_bytes

LOG = logging.getLogger("fedloom")
ROSTER = "roster.json"
LARGEST = 64 << 20  # bytes of a roster
MOST_SAMPLES = 1 << 40


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
    strangers: set[int] = field(default_factory=set)  # nodes that were asked and have no place here

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


@dataclass(frozen=True)
class Registrar:
    """Asks nodes who they are."""

    post: Post
    digest: str  # of the model
    local: str  # settings that the clients are to train by
    max_samples: int | None

    def enrol(self, clients: int, patience: float) -> Roster:
        """Wait until so many clients have introduced themselves."""
        deadline = time.monotonic() + patience
        found: dict[int, tuple[int, int]] = {}  # by node: partition and samples
        strangers: set[int] = set()
        told = -1
        while True:
            fresh = sorted(set(self.post.connected()) - set(found) - strangers)
            for node, introduced in self.ask(fresh, min(60.0, patience)).items():
                taken = {partition: other for other, (partition, _) in found.items() if partition >= 0}
                why = _misplaced(introduced[0], clients, taken) if introduced else "it gave no introduction"
                if introduced is None or why:
                    LOG.warning("node %d is left out: %s", node, why)
                    strangers.add(node)
                elif len(found) < clients:
                    found[node] = introduced
            if len(found) == clients:
                return Roster(secrets.token_hex(16), 1, _numbered(found, clients), strangers)
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
        fresh = sorted(set(self.post.connected()) - {member.node for member in roster.members} - roster.strangers)
        if not fresh or not missing:
            return
        for node, introduced in self.ask(fresh, 60.0).items():
            client = -1 if introduced is None else introduced[0]
            if introduced is None or client not in missing or introduced[1] != roster.members[client].samples:
                roster.strangers.add(node)
                LOG.warning("node %d is left out: it is none of the run's clients", node)
                continue
            LOG.warning("client %d is back as node %d", client, node)
            roster.members[client] = replace(roster.members[client], node=node)

    def ask(self, nodes: Iterable[int], patience: float) -> dict[int, tuple[int, int] | None]:
        """Partition and samples of nodes; None: it did not say, or can't take part."""
        question = {"protocol": PROTOCOL, "local": self.local}
        asked = {node: RecordDict({"question": ConfigRecord(question)}) for node in nodes}
        if not asked:
            return {}
        answers = self.post.exchange(asked, QUERY, patience)
        return {node: self._introduced(node, answers.get(node)) for node in asked}

    def _introduced(self, node: int, answer: Any) -> tuple[int, int] | None:
        kinds = {"protocol": int, "samples": int, "partition": int, "digest": str}
        try:
            if not isinstance(answer, RecordDict):
                raise Refused(str(answer) if answer else "it did not answer")
            found = read_fields(answer, "introduction", kinds)
            if found["digest"] != self.digest:
                raise Refused("it has another model than the server")
            if not 0 < found["samples"] <= (self.max_samples or MOST_SAMPLES):
                raise Refused(f"it says that it has {found['samples']} samples")
        except Refused as error:
            LOG.warning("node %d: %s", node, error)
            return None
        return found["partition"], found["samples"]


def _misplaced(partition: int, clients: int, taken: dict[int, int]) -> str:
    if partition >= clients:
        return f"its partition-id is {partition}, but there are {clients} clients"
    if partition in taken:
        return f"node {taken[partition]} has its partition-id, {partition}, already"
    return ""


def _numbered(found: dict[int, tuple[int, int]], clients: int) -> list[Member]:
    placed = {partition: node for node, (partition, _) in found.items() if partition >= 0}
    free = iter(sorted(set(range(clients)) - set(placed)))
    placed |= {next(free): node for node, (partition, _) in sorted(found.items()) if partition < 0}
    return [Member(placed[client], found[placed[client]][1]) for client in range(clients)]
