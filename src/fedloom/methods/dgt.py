"""DGT. Li, Zhang, Li, Gong, Wang: Dynamic Gradient Tailor for Non-I.I.D. Federated Learning (Algorithms 1 and 2).

Each client's update is compared with the sum of the others', and turned towards it if it agrees less than this client
used to. Phi_k, its baseline, begins at 0 and stays while the client is away.

    POP_k = sum_j g_j - g_k
    phi = cos(g_k, POP_k)
    if phi < Phi_k:
        a2 = |g_k| (Phi_k sqrt(1 - phi^2) - phi sqrt(1 - Phi_k^2)) / (|POP_k| sqrt(1 - Phi_k^2))
        g_k <- g_k + a2 POP_k                                so that cos(g_k, POP_k) = Phi_k
    Phi_k <- alpha Phi_k + (1 - alpha) phi                   always, with the phi from before

What it does: conflicting updates lose their conflict before they are averaged. In the first round it projects them
onto the plane orthogonal to the others.
When it helps: few classes per client, many clients in a round.
What it costs: no traffic; one number per client at the server; a few passes over the K x P updates.

Departures: Eq. 7 and Algorithm 2 print POP_k where the baseline Phi_k is meant; this is GradVac's formula with POP as
its target. The paper does not give alpha: 0.99 is GradVac's. All k are taken from the original updates. Where clients
are weighed by samples POP is formed from the weighted updates. Phi_k is kept below 1 - 1e-6, where the formula blows
up; `max_scale` bounds how much longer an update may become. An update of zero, or one that is alone, stays as it is.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedloom.method import register
from fedloom.space import GroupBy
from fedloom.stages import Setup, State, Update, Updates, check, scalar

HIGHEST = 1 - 1e-6


@register("dgt", paper="Li et al. (DGT)")
@dataclass(frozen=True)
class Dgt(Update):
    """Turn conflicting updates towards the others before they are averaged."""

    alpha: float = 0.99
    max_scale: float | None = None
    groups: GroupBy = "model"
    rank = 30
    breaks_privacy = "mixes the others' updates into each one after it was clipped"

    def __post_init__(self) -> None:
        check(0 <= self.alpha <= 1, f"dgt: alpha must be between 0 and 1, not {self.alpha}")
        check(self.max_scale is None or self.max_scale >= 1, f"dgt: max_scale must be at least 1, not {self.max_scale}")

    def init(self, setup: Setup) -> State:
        groups = len(setup.space.groups(self.groups))
        baseline = torch.zeros(setup.clients, groups, dtype=torch.float64)  # [owner, group]
        return {"baseline": baseline, "calibrated": scalar(0), "cosine": scalar("nan")}

    def apply(self, state: State, updates: Updates) -> tuple[State, Updates]:
        w = updates.weights
        total = updates.rows.weighted_sum(w)
        compare = updates.rows.beside_rest(total, w, self.groups)
        table = torch.stack([*compare, w.double()[:, None].expand_as(compare.own)]).cpu()  # all at once
        along, own, rest, across, w = (*table[:4], table[4, :, :1])

        # Rounding leaves a trace where the rest is nothing.
        tiny = (64 * torch.finfo(total.dtype).eps) ** 2
        compared = (own > 0) & (rest > tiny * w.square() * own)
        phi = torch.where(compared, along / (own * rest).sqrt().clamp(min=1e-300), 0.0).clamp(-1, 1)
        baseline = _at_least(state["baseline"], 1 + int(updates.owners.max()))
        kept = baseline[updates.owners]
        target = kept.clamp(max=HIGHEST)
        turns = compared & (phi < target)

        sine = (across / own.clamp(min=1e-300)).sqrt()  # not sqrt(1 - phi^2), which is noise where phi is near 1
        sine_target = (1 - target.square()).sqrt()
        a2 = (own / rest.clamp(min=1e-300)).sqrt() * (target * sine - phi * sine_target) / sine_target
        a2 = torch.where(turns, a2, 0.0)
        shrink = torch.ones_like(a2)
        if self.max_scale is not None:
            shrink = torch.where(turns, (self.max_scale * sine_target / sine.clamp(min=1e-300)).clamp(max=1.0), 1.0)
        # g + a2 (total - w g) = (1 - a2 w) g + a2 total
        device = total.device
        scale, share = shrink * (1 - a2 * w), shrink * a2
        scale, share = torch.stack([scale, share]).to(device, non_blocking=True)
        rows = updates.rows.blend(scale, total, share, self.groups)

        baseline[updates.owners] = torch.where(compared, self.alpha * kept + (1 - self.alpha) * phi, kept)
        state = {
            **state,
            "baseline": baseline,
            "calibrated": turns.double().mean(),
            "cosine": phi[compared].mean() if bool(compared.any()) else scalar("nan"),
        }
        return state, replace(updates, rows=rows)

    def report(self, state: State) -> dict[str, Tensor]:
        return {"calibrated": state["calibrated"], "cosine": state["cosine"]}


def _at_least(baseline: Tensor, owners: int) -> Tensor:
    """A copy with room for so many: a given cohort may hold more travelling models than there are clients."""
    return torch.cat([baseline, baseline.new_zeros(max(0, owners - len(baseline)), baseline.shape[1])])
