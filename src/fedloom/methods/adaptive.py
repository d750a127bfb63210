"""What FedAdam, FedYogi and FedAdagrad share. Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan:
Adaptive Federated Optimization. ICLR 2021 (Algorithm 2).

With g the average of start minus end (the paper's Delta is -g):

    m <- beta1 m + (1 - beta1) g
    v <- second(v, g^2)                             each method's own
    theta <- theta - lr m / (sqrt(v) + tau)

v begins at tau^2 and nothing is corrected for bias, as in the paper; `bias_correction` multiplies the step by
sqrt(1 - beta2^s) / (1 - beta1^s) at step s, as in Adam. A rescaler scales the g of the first moment only.
"""

import math

from torch import Tensor

from fedloom.stages import Round, Server, Setup, State, check, scalar, zeros


class Adaptive(Server):
    """The server steps by its own scale in each coordinate."""

    lr: float
    beta1: float
    beta2: float = 0.0  # a method without it has nothing to correct in the second moment
    tau: float
    bias_correction: bool
    v_init: float | None
    breaks_privacy = None

    def __post_init__(self) -> None:
        name = type(self).__name__.lower()
        check(0 < self.lr < math.inf, f"{name}: lr must be above 0, not {self.lr}")
        check(0 <= self.beta1 < 1, f"{name}: beta1 must be at least 0 and below 1, not {self.beta1}")
        check(0 <= self.beta2 < 1, f"{name}: beta2 must be at least 0 and below 1, not {self.beta2}")
        check(0 < self.tau < math.inf, f"{name}: tau must be above 0, not {self.tau}")
        check(self.v_init is None or 0 <= self.v_init < math.inf, f"{name}: v_init must be at least 0")

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """The second moment after one more squared average."""
        raise NotImplementedError

    def init(self, setup: Setup) -> State:
        v_init = self.tau**2 if self.v_init is None else self.v_init
        return {"m": zeros(setup), "v": zeros(setup) + v_init, "steps": scalar(0)}

    def step(self, state: State, record: Round) -> tuple[State, Tensor]:
        steps = state["steps"] + 1
        m = self.beta1 * state["m"] + (1 - self.beta1) * record.scaled
        v = self.second(state["v"], record.aggregate.square())
        lr = self.lr
        if self.bias_correction:
            s = float(steps)
            lr *= math.sqrt(1 - self.beta2**s) / (1 - self.beta1**s)
        theta = record.theta - lr * m / (v.sqrt() + self.tau)
        return {"m": m, "v": v, "steps": steps}, theta

    def report(self, state: State) -> dict[str, Tensor]:
        return {"mean_rate": self.lr * (state["v"].sqrt() + self.tau).reciprocal().mean()}
