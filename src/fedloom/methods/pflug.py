"""Pflug's diagnostic: has training become stationary? Georg Ch. Pflug: Non-asymptotic confidence bounds for stochastic
approximation algorithms. 1990; as used by 2D-LRD.

With u_r the change of the cloud model in round r and S a running sum:

    S <- S + <u_r, u_{r-1}>
    if r > window + r0 and S < 0:   d <- d + 1,  S <- 0,  r0 <- r

Consecutive changes that point against each other make S fall; products are added inside the window too, the verdict
waits for its end. u_{r-1} is not reset.
"""

import torch
from torch import Tensor

from fedloom.space import Space
from fedloom.stages import Rate, Round, Setup, State, Wire, check, scalar, zeros


class Pflug(Rate):
    """A rate that falls with d, the number of times that training was found stationary."""

    window: int
    breaks_privacy = None  # the cloud model is all that it watches

    def check_window(self, name: str) -> None:
        check(self.window >= 0, f"{name}: window must be at least 0, not {self.window}")

    def init(self, setup: Setup) -> State:
        return {"u": zeros(setup), "sum": scalar(0), "d": scalar(0), "round": scalar(0), "since": scalar(0)}

    def observe(self, state: State, record: Round) -> State:
        u = record.after - record.theta
        total = state["sum"] + (u.double() @ state["u"].double()).cpu()
        now = state["round"] + 1
        state = {**state, "u": u, "sum": total, "round": now}
        if now > self.window + state["since"] and total < 0:
            return {**state, "d": state["d"] + 1, "sum": scalar(0), "since": now}
        return state

    def wire(self, space: Space) -> Wire:
        return Wire(down=1)  # d

    def report(self, state: State) -> dict[str, Tensor]:
        switched = torch.tensor(float(self.limit(state) == 1), dtype=torch.float64)
        return {"d": state["d"], "pflug": state["sum"], "switched": switched}
