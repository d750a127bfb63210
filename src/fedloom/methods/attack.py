"""Hostile clients, to measure what a method and its defences are worth. Blanchard, El Mhamdi, Guerraoui, Stainer:
Machine Learning with Adversaries. NeurIPS 2017 (sign-flip, noise); Bagdasaryan, Veit, Hua, Estrin, Shmatikov: How To
Backdoor Federated Learning. AISTATS 2020 (scale); Tolpegin, Truex, Gursoy, Liu: Data Poisoning Attacks Against
Federated Learning Systems. ESORICS 2020, and Fang, Cao, Jia, Gong: Local Model Poisoning Attacks to Byzantine-Robust
Federated Learning. USENIX Security 2020 (label-flip); Baruch, Baruch, Goldberg: A Little Is Enough: Circumventing
Defenses For Distributed Learning. NeurIPS 2019 (alie).

round(fraction N) clients, drawn once from the run's seed, are hostile in every round. Of the r updates that a Work
brings f are theirs. With s = `scale`:

    sign-flip    g_k <- -s g_k                                        s = 1
    scale        g_k <- s g_k                                         s = 10
    noise        g_k <- s |g_k| n / |n|   with n ~ N(0, I)            s = 10
    alie         g_k <- mean - z std      in every coordinate, over the r - f honest updates of the Work
                 z = Phi^-1((r - f - m) / (r - f)),  m = floor(r/2 + 1) - f,  or z = s
    label-flip   trains on C - 1 - y instead of y, of C classes; its update is sent as it is

What it does: it harms. sign-flip, scale and noise are loud; alie stays within the spread of honest updates, so that m
honest clients stand farther out; label-flip is an honest client's training on wrong data.
When it helps: in experiments that compare defences (clip, krum, median, trimmed-mean), and methods under them.
What it costs: nothing on the wire; label-flip a copy of the labels.

It acts on what every Work brings, before diverged updates are left out and before any stage hears of them: under
RADFed a hostile client hands a poisoned model to the next client. An update that overflows is counted as diverged.
What a hostile client sends beside its update (SCAFFOLD's change, scores, sizes, batch-norm statistics) and what it
remembers stay honest. A smaller fraction's hostile clients are among those of a larger one with the same seed.
Diagnostics see flipped labels, for they ask the clients, and updates as the server received them, but for what a probe
would bring; test and validation data stay clean. `attack.hostile` counts the updates that hostile clients sent in a
round, `diverged` ones included.

Departures: Baruch's attackers estimate mean and std from updates of their own; these know all honest ones, the
strongest form. Where f is so small that the formula gives a z below 0, z is 0; where m is below 1, it is 1. With fewer
than two honest updates alie does nothing.
"""

from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedloom.errors import MethodError
from fedloom.federation import Federation, has_target
from fedloom.keys import attack_rng, hostile_rng
from fedloom.method import register
from fedloom.rows import Rows
from fedloom.stages import Setup, State, Update, Updates, Work, check, scalar

Kind = Literal["sign-flip", "scale", "noise", "label-flip", "alie"]
USUAL = {"sign-flip": 1.0, "scale": 10.0, "noise": 10.0}


@register("attack", paper="Blanchard et al., NeurIPS 2017; Baruch et al., NeurIPS 2019")
def attack(kind: Kind = "sign-flip", fraction: float = 0.2, scale: float | None = None) -> Update:
    """Let some clients be hostile."""
    return Attack(kind, fraction, scale)


@dataclass(frozen=True)
class Attack(Update):
    how: Kind
    fraction: float
    scale: float | None
    rank = 0

    def __post_init__(self) -> None:
        check(0 <= self.fraction <= 1, f"attack: fraction must be between 0 and 1, not {self.fraction}")
        valid = self.scale is None or 0 < self.scale < float("inf")
        check(valid, f"attack: scale must be finite and above 0, not {self.scale}")
        check(self.how != "label-flip" or self.scale is None, "attack: label-flip changes labels; leave scale out")

    @property
    def compares(self) -> bool:
        return self.how == "alie"

    @property
    def reads_rows(self) -> bool:
        return self.how in ("alie", "noise")

    @property
    def breaks_privacy(self) -> str | None:
        return "alie makes hostile updates of honest ones, which then count more than once" if self.compares else None

    def init(self, setup: Setup) -> State:
        seed = torch.tensor(setup.seed, dtype=torch.int64)
        return {"hostile": hostile_clients(setup, self.fraction), "seed": seed, "received": scalar(0)}

    def before_round(self, state: State) -> State:
        return {**state, "received": scalar(0)}

    def tamper(self, federation: Federation, setup: Setup) -> Federation:
        if self.how != "label-flip":
            return federation
        if federation.classes is None:
            raise MethodError("attack: label-flip needs class labels, and these targets are none; choose another kind")
        if federation.shards is not None:
            raise MethodError("attack: label-flip changes labels, but these stay on disk (lazy=True); leave lazy out")
        return _flip(federation, federation.classes, hostile_clients(setup, self.fraction))

    def intercept(self, state: State, work: Work, updates: Updates) -> tuple[State, Updates]:
        hostile = state["hostile"][updates.clients]
        state = {**state, "received": state["received"] + hostile.sum()}
        theirs = (hostile & updates.finite).nonzero().flatten()
        if not len(theirs) or self.how == "label-flip":
            return state, updates
        if self.how == "alie":
            rows = self._hidden(updates.rows, theirs, (~hostile & updates.finite).nonzero().flatten())
        elif self.how == "noise":
            occurrence = work.occurrence[updates.slots]
            keys = [(work.w, int(updates.clients[k]), int(occurrence[k])) for k in theirs]
            rows = self._noisy(updates.rows, theirs, np.stack([_noise(state, key, updates.rows) for key in keys]))
        else:
            factor = torch.ones(len(updates), dtype=torch.float64)
            factor[theirs] = -self._s if self.how == "sign-flip" else self._s
            rows = updates.rows.scaled(factor)
        return state, replace(updates, rows=rows, finite=updates.finite & rows.finite())

    @property
    def _s(self) -> float:
        return USUAL[self.how] if self.scale is None else self.scale

    def _noisy(self, rows: Rows, theirs: Tensor, noise: np.ndarray) -> Rows:
        lengths = rows.select(theirs).distances(torch.zeros_like(rows.matrix[0]))
        directions = torch.from_numpy(noise / np.linalg.norm(noise, axis=1, keepdims=True))
        return rows.put(theirs, self._s * lengths[:, None] * directions.to(lengths.device))

    def _hidden(self, rows: Rows, theirs: Tensor, honest: Tensor) -> Rows:
        if len(honest) < 2:
            return rows
        z = z_max(len(theirs) + len(honest), len(theirs)) if self.scale is None else self.scale
        mean, std = rows.select(honest).moments()
        return rows.put(theirs, mean - z * std)

    def apply(self, state: State, updates: Updates) -> tuple[State, Updates]:
        return state, updates  # the harm is done

    def report(self, state: State) -> dict[str, Tensor]:
        return {"hostile": state["received"]}


def hostile_clients(setup: Setup, fraction: float) -> Tensor:
    """Who is hostile [N]."""
    hostile = torch.zeros(setup.clients, dtype=torch.bool)
    hostile[hostile_rng(setup.seed).permutation(setup.clients)[: round(fraction * setup.clients)]] = True
    return hostile


def z_max(r: int, f: int) -> float:
    """How many standard deviations f of r may stand off so that m of the others, who make a majority with them, stand
    farther off.
    """
    m = max(r // 2 + 1 - f, 1)
    return max(NormalDist().inv_cdf((r - f - m) / (r - f)), 0.0)


def _noise(state: State, key: tuple[int, int, int], rows: Rows) -> np.ndarray:
    return attack_rng(int(state["seed"]), *key).standard_normal(rows.space.size)


def _flip(federation: Federation, classes: int, hostile: Tensor) -> Federation:
    """The hostile clients' labels y as classes - 1 - y; samples that they share with honest clients are copied."""
    index = federation.index
    theirs = torch.repeat_interleave(hostile, federation.sizes)
    samples, place = torch.unique(index[theirs], return_inverse=True)
    if not len(samples):
        return federation
    there = samples.to(federation.y.device)
    old = federation.y[there]
    flipped = torch.where(has_target(old), classes - 1 - old, old)
    if not bool(torch.isin(samples, index[~theirs]).any()):
        y = federation.y.clone()
        y[there] = flipped
        return replace(federation, y=y)
    moved = index.clone()
    moved[theirs] = len(federation.y) + place
    x = torch.cat([federation.x, federation.x[samples.to(federation.x.device)]])
    return replace(federation, x=x, y=torch.cat([federation.y, flipped]), index=moved)
