"""SCAFFOLD. Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging for Federated
Learning. ICML 2020.

The server keeps a control variate c, each client its own c_k; both begin at zero. In a local run of K steps

    x <- x - eta (grad L_k(x) - c_k + c)
    c_k_new = mean of the K raw gradients grad L_k(x)        (the client sends c_k_new - c_k beside its model)
    c <- c + 1/N sum_k (c_k_new - c_k)                       over the clients that answered, N = all

so c stays the mean of all c_k.

What it does: it removes from each local gradient the client's own direction and puts that of all clients in its place.
When it helps: clients take part often, so that their c_k are fresh; many local steps.
What it costs: twice the traffic both ways, P numbers of memory per client, one vector addition a step.

Departures: the mean raw gradient is option II of the paper for plain SGD, and stays right under momentum, clipping and
Adam, where dividing by K eta does not. Public code that divides by the initial instead of the current rate shrinks the
control variates as the rate decays. The client stage alone is filled, so that it joins with any server. A row that an
update stage drops (Krum) leaves its client's c_k as written, and its change is taken back out of c.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.method import register
from fedloom.space import Space
from fedloom.stages import Client, Correction, Info, Round, Setup, State, Updates, Wire, Work, scalar, zeros


@register("scaffold", paper="Karimireddy et al., ICML 2020")
@dataclass(frozen=True)
class Scaffold(Client):
    """Replace each client's direction by that of all clients, with control variates."""

    weights = "equal"
    wants = frozenset({"mean_gradient"})
    remembers = {"c": "row"}
    breaks_privacy = "sends gradients up beside the update, which no noise covers"

    def init(self, setup: Setup) -> State:
        return {"c": zeros(setup), "clients": scalar(setup.clients)}

    def send(self, state: State) -> State:
        return {"c": state["c"]}

    def begin(self, memory: State, sent: State, info: Info) -> Correction:
        return Correction(drift=sent["c"] - memory["c"])

    def end(self, memory: State, sent: State, info: Info, updates: Updates) -> tuple[State, State]:
        c_new = updates.extra["mean_gradient"]
        return {"c": c_new}, {"dc": c_new - memory["c"]}

    def heard(self, state: State, work: Work, updates: Updates) -> State:
        return {**state, "c": state["c"] + self._change(state, updates)}

    def observe(self, state: State, record: Round) -> State:
        if len(record.updates) == len(record.received):
            return state
        dropped = ~torch.isin(record.received.slots, record.updates.slots)
        return {**state, "c": state["c"] - self._change(state, record.received.only(dropped.nonzero().flatten()))}

    def _change(self, state: State, updates: Updates) -> Tensor:
        dc = updates.total_up("dc")
        assert dc is not None  # nosec B101  # for the type checker
        return dc / float(state["clients"])

    def report(self, state: State) -> dict[str, Tensor]:
        return {"c_norm": torch.linalg.vector_norm(state["c"])}

    def wire(self, space: Space) -> Wire:
        return Wire(down=space.size, up=space.size)
