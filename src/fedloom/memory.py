"""What clients remember between rounds.

Each value carries the number of the Work that wrote it, and older ones are kept: a Work reads the newest value that is
older than itself, and a Work that is played again overwrites what it wrote the first time. So a server that resumes
behind its clients does not apply a memory twice. When a round is over, the last two values are enough.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fedloom.stages import State


@dataclass
class Memory:
    """The memory of one client stage over all clients; a client that was never seen costs nothing and reads as zero."""

    fields: Mapping[str, Literal["row", "scalar"]]
    like: Tensor  # [P] where rows live and of what kind
    _kept: dict[int, list[tuple[int, State]]] = field(default_factory=dict)  # by client, oldest first
    _written: set[int] = field(default_factory=set)  # clients that wrote since the last round ended

    def read(self, clients: Tensor, w: int) -> State:
        """[K, P] or [K] tensors: what each client knew before Work w."""
        found = [self._before(client, w) for client in clients.tolist()]
        return {name: _stack([known[name] for known in found], self._zero(name)) for name in self.fields}

    def write(self, clients: Tensor, w: int, values: State) -> None:
        for k, client in enumerate(clients.tolist()):
            older = [(v, known) for v, known in self._kept.get(client, []) if v < w]
            self._kept[client] = [*older, (w, {name: values[name][k].clone() for name in self.fields})]
            self._written.add(client)

    def settle(self) -> None:
        """A round is over: nothing before the last two values will be asked for again."""
        for client in self._written:
            self._kept[client] = self._kept[client][-2:]
        self._written.clear()

    def tensors(self) -> State:
        """Everything, as plain tensors: the inverse of `restore`."""
        found = [(client, w, known) for client, kept in sorted(self._kept.items()) for w, known in kept]
        stacked = {n: _stack([known[n] for _, _, known in found], self._zero(n)) for n in self.fields}
        where = torch.tensor([(client, w) for client, w, _ in found], dtype=torch.int64).reshape(-1, 2)
        return {"where": where, **{f"value.{name}": values for name, values in stacked.items()}}

    def restore(self, tensors: State) -> None:
        self._kept = {}
        for i, (client, w) in enumerate(tensors["where"].tolist()):
            known = {name: tensors[f"value.{name}"][i].to(self._zero(name)) for name in self.fields}
            self._kept.setdefault(client, []).append((w, known))

    def _before(self, client: int, w: int) -> State:
        older = [known for v, known in self._kept.get(client, []) if v < w]
        return older[-1] if older else {name: self._zero(name) for name in self.fields}

    def _zero(self, name: str) -> Tensor:
        scalar = self.fields[name] == "scalar"
        return torch.zeros((), dtype=torch.float64) if scalar else torch.zeros_like(self.like)


def _stack(values: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(values) if values else like.new_empty((0, *like.shape))
