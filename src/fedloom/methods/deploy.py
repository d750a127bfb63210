"""Which model users get, under methods whose cloud model is no average (FedDyn, AdaBest).

| deploy | model |
| --- | --- |
| aggregate | bar^t, the average of the last round's models |
| cloud | theta^t, which the next round starts from |
| latest_of_all | the mean over all N clients of each one's latest model; who was never seen counts as the initial one |
| running_mean | the mean of bar^t over all rounds |
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedloom.stages import Client, Info, Server, Setup, State, Updates, Work, scalar

Deploy = Literal["aggregate", "cloud", "latest_of_all", "running_mean"]


@dataclass(frozen=True)
class Latest(Client):
    """Tells the server how much each client's model changed since its last one.

    A simulation keeps the latest models where clients keep their memory; a real server would keep them itself, so
    nothing is counted on the wire.
    """

    remembers = {"latest": "row"}
    breaks_privacy = "deploys a mean of single models, to which no noise is added"

    def init(self, setup: Setup) -> State:
        return {"origin": setup.start}

    def send(self, state: State) -> State:
        return {"origin": state["origin"]}

    def end(self, memory: State, sent: State, info: Info, updates: Updates) -> tuple[State, State]:
        latest = info.start - updates.rows.matrix - sent["origin"]
        return {"latest": latest}, {"latest_change": latest - memory["latest"]}


class Deploying(Server):
    """A server that keeps the average bar, and offers one of the four models."""

    deploy_as: Deploy

    def init(self, setup: Setup) -> State:
        state = {"bar": setup.start.clone()}  # bar^0 = theta^0
        if self.deploy_as == "latest_of_all":
            state |= {"latest": setup.start.clone(), "clients": scalar(setup.clients)}
        elif self.deploy_as == "running_mean":
            state |= {"running": setup.start.clone(), "rounds": scalar(0)}
        return state

    def heard(self, state: State, work: Work, updates: Updates) -> State:
        change = updates.total_up("latest_change")
        if change is None:
            return state
        return {**state, "latest": state["latest"] + change / float(state["clients"])}

    def averaged(self, state: State, bar: Tensor) -> State:
        """The state after one more average."""
        if self.deploy_as == "running_mean":
            rounds = state["rounds"] + 1
            state = {**state, "rounds": rounds, "running": state["running"] + (bar - state["running"]) / float(rounds)}
        return {**state, "bar": bar}

    def deploy(self, state: State, theta: Tensor) -> Tensor:
        kept = {"aggregate": "bar", "latest_of_all": "latest", "running_mean": "running"}
        return theta if self.deploy_as == "cloud" else state[kept[self.deploy_as]]
