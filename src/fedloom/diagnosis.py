"""What is measured beside training: diagnostics by name, each with what it costs.

    fl.fit(..., diagnose="gsi,similarity")

| name | measures | in the round's line |
| --- | --- | --- |
| gsi | how far the clients of a round agree (FedGLAD, Eq. 9) | gsi.model, gsi.tensor |
| similarity | angles between updates (DGT), spread of their lengths (FedGLAD, Table 4) | similarity.* |
| labels | how near the labels of the round's clients are to those of all (FedGLAD, Eq. 16-18) | labels.similarity |
| divergence | DL: how far clients are apart (RADFed, Eq. 3) | divergence.updates, divergence.models |
| twin | DC: how far the model is from one trained on the pooled data of the same clients (RADFed) | twin.distance |
| fairness | the deployable model's score on every client's own data (FedGLAD, App. R) | fairness.* |
| probe | what all clients would send, not only the sampled ones (FedGLAD, Figs. 8 and 9) | probe.* |

The norms of the cloud model and of the average (theta_norm, aggregate_norm) are measured wherever a round is evaluated.
What is measured after every Work of a round that has several (RADFed) is also there as a list, `between_...`.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedloom.diagnose.drift import norms
from fedloom.diagnostics import KINDS, SNAPSHOTS, Look, finite
from fedloom.errors import ConfigError, nearest
from fedloom.round import Outcome, RunState
from fedloom.simulation import Simulation
from fedloom.stages import Metrics, State, Updates, Work


def named(text: str | Sequence[str] | None) -> tuple[str, ...]:
    """The diagnostics that are asked for: "gsi,similarity", or a list.

    >>> named("gsi, labels")
    ('gsi', 'labels')
    """
    if text is None:
        return ()
    parts = text.split(",") if isinstance(text, str) else text
    if not isinstance(parts, Sequence) or not all(isinstance(part, str) for part in parts):
        raise ConfigError(f"diagnose must name diagnostics, such as 'gsi,similarity', not {text!r}")
    names = {part.strip() for part in parts if part.strip()}
    for name in sorted(names):
        if name not in KINDS:
            raise ConfigError(f"unknown diagnostic {name!r}: {nearest(name, KINDS)}")
    return tuple(name for name in KINDS if name in names)  # in whatever order they were named


class Diagnosis:
    """The diagnostics of one run."""

    def __init__(self, names: Sequence[str], simulation: Simulation, rounds: int) -> None:
        self.simulation = simulation
        self.chosen = [KINDS[name]() for name in names]
        self.costs = [f"diagnose {one.name}: {one.cost(simulation)}" for one in self.chosen]
        self.every = math.ceil(rounds / SNAPSHOTS)
        self.rounds = rounds
        self.between: dict[str, list[float]] = {}
        self.after: dict[int, State] = {}  # what they remember after a round; of the last two that are over

    def begin(self) -> None:
        """A round begins."""
        self.between = {}
        for one in self.chosen:
            one.begin()

    def heard(self, work: Work, updates: Updates) -> None:
        """A Work has come back."""
        if not self.chosen or not len(good := finite(updates)):
            return
        for one in self.chosen:
            for name, value in one.heard(self.simulation, work, good).items():
                self.between.setdefault(name, []).append(value)

    def measure(self, before: RunState, outcome: Outcome, evaluated: bool) -> Metrics:
        """What there is to say about a round that is over."""
        found = self._measured(before, outcome, evaluated)
        now = {f"{one.name}/{name}": value for one in self.chosen for name, value in one.tensors().items()}
        self.after = {before.round: self.after.get(before.round, {}), outcome.state.round: now}
        return found

    def _measured(self, before: RunState, outcome: Outcome, evaluated: bool) -> Metrics:
        record = outcome.record
        if record is None:
            return {}
        found: Metrics = {}
        if evaluated:
            found |= {f"{n}_norm": v for n, v in norms(theta=record.after, aggregate=record.aggregate).items()}
        found |= {name: values[-1] for name, values in self.between.items()}
        snapshot = outcome.state.round % self.every == 0 or outcome.state.round == self.rounds
        look = Look(self.simulation, before, outcome, record, snapshot)
        for one in self.chosen:
            found |= one.measure(look)
        lists = {f"between_{n.replace('.', '_')}": values for n, values in self.between.items() if len(values) > 1}
        return {**found, **lists}

    def tensors(self, round: int) -> State:
        """What they remember after this round, whatever was begun since."""
        return self.after.get(round, {})

    def restore(self, tensors: Mapping[str, Tensor], round: int, device: torch.device) -> None:
        self.after = {round: dict(tensors)}
        for one in self.chosen:
            own = f"{one.name}/"
            one.restore({n.removeprefix(own): t.to(device) for n, t in tensors.items() if n.startswith(own)})
