"""Krum as a filter. Blanchard, El Mhamdi, Guerraoui, Stainer: Machine Learning with Adversaries: Byzantine Tolerant
Gradient Descent. NeurIPS 2017.

    score_i = sum of the squared distances from update i to its r - f - 2 nearest others
    keep the updates with the lowest scores (r - f of them; Krum itself keeps one)

What it does: updates far from all others are left out before anything is averaged.
When it helps: at most f hostile or broken clients among r >= 2f + 3.
What it costs: nothing on the wire; all pairs of updates at the server. On skewed data honest outliers go too.

With fewer than 2f + 3 updates nothing is filtered, and the log says so once. Ties: the earlier client stays.
"""

import logging
from dataclasses import dataclass

from torch import Tensor

from fedloom.method import register
from fedloom.stages import Setup, State, Update, Updates, check, scalar

LOG = logging.getLogger("fedloom")


@register("krum", paper="Blanchard et al., NeurIPS 2017")
@dataclass(frozen=True)
class Krum(Update):
    """Leave out the updates that are far from all others."""

    byzantine: int = 1
    keep: int | None = None
    rank = 20
    reads_rows = True
    breaks_privacy = "lets one client's update decide which others are averaged"

    def __post_init__(self) -> None:
        check(self.byzantine >= 0, f"krum: byzantine must be at least 0, not {self.byzantine}")
        check(self.keep is None or self.keep >= 1, f"krum: keep must be at least 1, not {self.keep}")

    def init(self, setup: Setup) -> State:
        return {"kept": scalar("nan"), "warned": scalar(0)}

    def apply(self, state: State, updates: Updates) -> tuple[State, Updates]:
        r, f = len(updates), self.byzantine
        if r < 2 * f + 3:
            said = "staleness" in updates.extra  # an asynchronous schedule has remarked on it already
            if not said and not state["warned"]:
                LOG.warning("krum needs %d updates for byzantine=%d; a round with %d is not filtered", 2 * f + 3, f, r)
            return {"kept": scalar(r), "warned": scalar(1)}, updates
        squares = updates.rows.pairwise_squares().cpu()
        squares.fill_diagonal_(float("inf"))
        scores = squares.sort(dim=1).values[:, : r - f - 2].sum(1)
        number = min(self.keep or r - f, r)
        kept = scores.sort(stable=True).indices[:number].sort().values
        return {**state, "kept": scalar(number)}, updates.only(kept)

    def report(self, state: State) -> dict[str, Tensor]:
        return {"kept": state["kept"]}
