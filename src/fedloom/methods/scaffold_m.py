"""SCAFFOLD/m: SCAFFOLD that uploads the model only, as presented in Varno, Saghayi, Rafiee Sevyeri, Gupta, Matwin,
Havaei: AdaBest: Minimizing Client Drift in Federated Learning via Adaptive Bias Estimation. ECCV 2022.

Each client computes c_k as SCAFFOLD does in its option II; the server rebuilds the sum of the changes from the
models, with sigma the sum of the K learning rates of the local run:

    c_k_new = c_k - c + (theta - theta_k) / sigma
    c <- (N - r)/N c + 1/N sum_k (theta - theta_k) / sigma

What it does: the same as scaffold, to rounding, where the client stage is its own (a pull, or rows that Krum drops, are
part of what the server sees).
When it helps: where uplink is dear.
What it costs: twice the traffic down, none more up, P numbers of memory per client.

Departures: the paper prints the factor (N - 1)/N, which is right for r = 1 only; with (N - r)/N the recursion
reproduces SCAFFOLD's c. It repeats the server's formula on the client's line, and uses h^t where the received h^{t-1}
is meant. Momentum, Adam, clipping, weight decay and unequal numbers of steps break the formula, and are refused.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.method import register
from fedloom.space import Space
from fedloom.stages import Client, Correction, Info, Setup, State, Updates, Wire, Work, check, scalar, zeros


@register("scaffold-m", paper="Varno et al., ECCV 2022")
@dataclass(frozen=True)
class ScaffoldM(Client):
    """SCAFFOLD that sends nothing but the model up."""

    weights = "equal"
    remembers = {"c": "row"}
    breaks_privacy = "sends back the mean of what it received before noise was added"

    def init(self, setup: Setup) -> State:
        local = setup.local
        why = "it rebuilds the mean gradient from the model's change, which"
        check(local.optimizer == "sgd", f"scaffold-m refuses optimizer={local.optimizer!r}: {why} Adam rescales")
        check(not local.momentum, f"scaffold-m refuses local momentum: {why} then counts gradients more than once")
        check(local.clip_norm is None, f"scaffold-m refuses clip_norm: {why} is clipped")
        check(not local.weight_decay, f"scaffold-m refuses weight_decay: {why} then holds the decay too")
        steps = {local.count_steps(n) for n in set(setup.sizes.tolist())}
        check(
            len(steps) == 1,
            f"scaffold-m refuses unequal numbers of local steps ({min(steps)} to {max(steps)}): set steps=",
        )
        return {"c": zeros(setup), "clients": scalar(setup.clients)}

    def send(self, state: State) -> State:
        return {"c": state["c"]}

    def begin(self, memory: State, sent: State, info: Info) -> Correction:
        return Correction(drift=sent["c"] - memory["c"])

    def end(self, memory: State, sent: State, info: Info, updates: Updates) -> tuple[State, State]:
        sigma = _sigma(info.rates)
        if sigma == 0:  # nobody moved, nothing was learned of any gradient
            return memory, {}
        return {"c": memory["c"] - sent["c"] + updates.rows.matrix / sigma}, {}

    def heard(self, state: State, work: Work, updates: Updates) -> State:
        r, n = len(updates), float(state["clients"])
        sigma = _sigma(work.rates)
        if sigma == 0:
            return state
        rebuilt = updates.rows.weighted_sum(torch.ones(r)) / sigma
        return {**state, "c": (n - r) / n * state["c"] + rebuilt / n}

    def report(self, state: State) -> dict[str, Tensor]:
        return {"c_norm": torch.linalg.vector_norm(state["c"])}

    def wire(self, space: Space) -> Wire:
        return Wire(down=space.size)


def _sigma(rates: Tensor) -> float:
    """The sum of the rates, the same for every client since their numbers of steps are."""
    return float((rates if rates.dim() == 1 else rates[0]).sum())
