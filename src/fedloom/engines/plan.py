"""Which samples each client of a Work trains on in each local step, as arrays that a device can be given at once."""

from collections.abc import Sequence
from dataclasses import dataclass

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


def batches_of(setup: Setup, federation: Federation, work: Work, k: int) -> list[np.ndarray]:
    """The batches of the k-th client of a Work, as positions in the federation."""
    client = int(work.clients[k])
    rng = client_rng(setup.seed, work.w, client, int(work.occurrence[k]))
    begin, end = federation.offsets[client : client + 2].tolist()
    mine = federation.index[begin:end].numpy()
    return [mine[batch] for batch in setup.local.batches(end - begin, rng, work.max_steps)]


def ordered_batches_of(setup: Setup, federation: Federation, client: int) -> list[np.ndarray]:
    """One epoch of a client in stored order."""
    begin, end = federation.offsets[client : client + 2].tolist()
    mine = federation.index[begin:end].numpy()
    return [mine[batch] for batch in setup.local.batches_in_order(end - begin)]


def plan(batches: Sequence[Sequence[np.ndarray]]) -> Plan:
    """One list of batches per client, as arrays."""
    steps = np.array([len(own) for own in batches], dtype=np.int64)
    order = np.argsort(-steps, kind="stable")
    widest = max((len(batch) for own in batches for batch in own), default=0)
    samples = np.zeros((int(steps.max(initial=0)), len(batches), widest), dtype=np.int64)
    lengths = np.zeros(samples.shape[:2], dtype=np.int64)
    for row, k in enumerate(order):
        for s, batch in enumerate(batches[k]):
            samples[s, row, : len(batch)] = batch
            samples[s, row, len(batch) :] = batch[0]
            lengths[s, row] = len(batch)
    return Plan(order, steps[order], samples, lengths)


def keys_of(setup: Setup, federation: Federation, model: nn.Module, work: Work) -> Tensor | None:
    """Two words for what is drawn on the device for each client [K, 2]; None where nothing is."""
    if not federation.preparation.augment and not has_dropout(model):
        return None
    asked = zip(work.clients.tolist(), work.occurrence.tolist(), strict=True)
    words = [client_key(setup.seed, work.w, client, i).tolist() for client, i in asked]
    return torch.tensor(words, dtype=torch.int64).reshape(-1, 2).to(work.start.device)
