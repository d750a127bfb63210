"""Which samples each client of a Work trains on in each local step, as arrays that a device can be given at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.engines.dropout import has_dropout
from fedloom.federation import Federation
from fedloom.keys import client_key, client_rng
from fedloom.stages import Setup, Work


@dataclass(frozen=True)
class Plan:
    """The batches of K clients, those with the most steps first.

    `samples[s, k]` are the positions of client k's batch in step s; beyond `lengths[s, k]` its first sample is
    repeated, and beyond its last step everything is 0.
    """

    order: np.ndarray  # [K] place in the Work of each row
    steps: np.ndarray  # [K] falling
    samples: np.ndarray  # [S, K, B]
    lengths: np.ndarray  # [S, K]

    def active(self, s: int) -> int:
        """How many clients take step s: the first so many."""
        return int(np.searchsorted(-self.steps, -s, side="left"))


class Batches(NamedTuple):
    """One client's batches."""

    samples: np.ndarray  # batch after batch: places among the client's own samples, or positions in the federation
    lengths: np.ndarray  # of the batches

    @property
    def longest(self) -> int:
        """The length of the longest: only the last of an epoch may be shorter than the first."""
        return int(self.lengths[0]) if len(self.lengths) else 0

    def at(self, positions: np.ndarray) -> "Batches":
        """The same batches, where the client's samples lie at these positions."""
        return Batches(positions[self.samples], self.lengths)

    def cut(self) -> list[np.ndarray]:
        return np.split(self.samples, np.cumsum(self.lengths)[:-1]) if len(self.lengths) else []


def batches_of(setup: Setup, federation: Federation, work: Work) -> list[Batches]:
    """The batches of each client of a Work, as places among its own samples."""
    sizes = federation.sizes_of(work.clients).tolist()
    found = []
    for client, i, size in zip(work.clients.tolist(), work.occurrence.tolist(), sizes, strict=True):
        rng = client_rng(setup.seed, work.w, client, i)
        found.append(Batches(*setup.local.batches(size, rng, work.max_steps)))
    return found


def ordered_batches_of(setup: Setup, federation: Federation, clients: Sequence[int]) -> list[Batches]:
    """One epoch of each client in stored order, as positions in the federation."""
    found = []
    for positions in federation.positions(clients):
        batches = setup.local.batches_in_order(len(positions))
        order = np.concatenate(batches) if batches else np.empty(0, dtype=np.int64)
        found.append(Batches(positions[order], np.array([len(batch) for batch in batches])))
    return found


def plan(batches: Sequence[Batches]) -> Plan:
    """Many clients' batches, as arrays."""
    steps = np.array([len(own.lengths) for own in batches], dtype=np.int64)
    order = np.argsort(-steps, kind="stable")
    widest = max((own.longest for own in batches), default=0)
    samples = np.zeros((int(steps.max(initial=0)), len(batches), widest), dtype=np.int64)
    lengths = np.zeros(samples.shape[:2], dtype=np.int64)
    places = np.arange(widest)
    for row, k in enumerate(order):
        own, n = batches[k], int(steps[k])
        lengths[:n, row] = own.lengths
        if len(own.samples) == n * widest:
            samples[:n, row] = own.samples.reshape(n, widest)
        elif n:
            first = own.samples[np.cumsum(own.lengths) - own.lengths]
            samples[:n, row] = first[:, None]
            samples[:n, row][places < own.lengths[:, None]] = own.samples
    return Plan(order, steps[order], samples, lengths)


def keys_of(setup: Setup, federation: Federation, model: nn.Module, work: Work) -> Tensor | None:
    """Two words for what is drawn on the device for each client [K, 2]; None where nothing is."""
    if not federation.preparation.augment and not has_dropout(model):
        return None
    asked = zip(work.clients.tolist(), work.occurrence.tolist(), strict=True)
    words = [client_key(setup.seed, work.w, client, i).tolist() for client, i in asked]
    return torch.tensor(words, dtype=torch.int64).reshape(-1, 2).to(work.start.device, non_blocking=True)


def width_of(longest: int, most: int) -> int:
    """How many places batches of this length get, where none is longer than `most`: few different numbers, so that few
    recordings are made.
    """
    return min(power_of_two(longest), max(most, longest))


def power_of_two(n: int) -> int:
    """The smallest that is not below n."""
    return 1 << max(n - 1, 0).bit_length()
