"""AdaBest. Varno, Saghayi, Rafiee Sevyeri, Gupta, Matwin, Havaei: AdaBest: Minimizing Client Drift in Federated
Learning via Adaptive Bias Estimation. ECCV 2022 (Algorithm 1).

Each client keeps h_k and t'_k, the Work in which it last took part; the server keeps bar, with bar^0 = theta^0.

    x <- x - eta (grad L_k(x) - mu_k h_k)         mu_k = mu nbar / n_k, nbar the mean of all sizes reported so far
    g_k = theta - theta_k
    h_k <- h_k / (t - t'_k) + g_k                 the first time h_k = g_k
    bar^t = mean theta_k
    h^t = beta (bar^{t-1} - bar^t)
    theta^t = bar^t - h^t

What it does: it estimates each client's drift from its own last updates and removes it; the server looks ahead along
the change of the average. Old estimates fade: a gap of ten rounds leaves a tenth.
When it helps: low participation, many rounds, skewed data; |h| stays bounded where FedDyn's grows.
What it costs: no traffic but two numbers, P + 1 numbers of memory per client, one vector addition a step.

Departures: h_k is kept without mu, so that mu_k may vary (Eq. 3; Algorithm 1 keeps it inside; the same for constant
mu). The power in Remark 3 is t - tau + 1, as in the appendix; the main text's t - tau is too large by 1/beta. The
released simulator scales mu by batch size and epochs; the paper's mean of samples is followed. Weights are equal. The
paper decays beta on a plateau of |h| in one sentence without numbers: `beta_decay` is the factor, applied when |h|
has not fallen by 1% below its best for 50 rounds, at most every 50 rounds. Under RADFed t counts Works. A rescaled
average replaces the plain one everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.method import register
from fedloom.methods.deploy import Deploy, Deploying, Latest
from fedloom.space import Space
from fedloom.stages import Client, Correction, Info, Round, Setup, Stage, State, Updates, Wire, Work, check, scalar

PATIENCE = 50
GAIN = 0.01


@register("adabest", paper="Varno et al., ECCV 2022")
def adabest(
    beta: float = 0.96, mu: float = 0.02, deploy: Deploy = "aggregate", beta_decay: float | None = None
) -> Sequence[Stage]:
    """Estimate each client's drift from its last updates, and remove it."""
    stages: list[Stage] = [AdaBestClient(mu), AdaBestServer(beta, deploy, beta_decay)]
    return [*stages, Latest()] if deploy == "latest_of_all" else stages


@dataclass(frozen=True)
class AdaBestClient(Client):
    mu: float
    weights = "equal"
    remembers = {"h": "row", "t": "scalar"}

    def __post_init__(self) -> None:
        check(0 <= self.mu < float("inf"), f"adabest: mu must be at least 0, not {self.mu}")

    @property
    def breaks_privacy(self) -> str | None:
        return "with mu above 0 tells every client the mean of the sizes of those that answered" if self.mu else None

    def init(self, setup: Setup) -> State:
        return {"reported": scalar(0), "reports": scalar(0)}

    def send(self, state: State) -> State:
        return {"nbar": state["reported"] / state["reports"].clamp(min=1)} if self.mu else {}

    def begin(self, memory: State, sent: State, info: Info) -> Correction:
        if not self.mu:
            return Correction()
        mu_k = self.mu * sent["nbar"] / info.samples.double()
        return Correction(drift=-mu_k.to(memory["h"], non_blocking=True)[:, None] * memory["h"])

    def end(self, memory: State, sent: State, info: Info, updates: Updates) -> tuple[State, State]:
        t = info.w + 1
        fade = (1 / (t - memory["t"])).to(
            memory["h"], non_blocking=True
        )  # t' = 0 for a client never seen, whose h is zero
        h = fade[:, None] * memory["h"] + updates.rows.matrix
        return {"h": h, "t": torch.full_like(memory["t"], t)}, {}

    def heard(self, state: State, work: Work, updates: Updates) -> State:
        return {
            "reported": state["reported"] + updates.samples.sum(),
            "reports": state["reports"] + len(updates),
        }

    def wire(self, space: Space) -> Wire:
        return Wire(down=1, up=1) if self.mu else Wire()


@dataclass(frozen=True)
class AdaBestServer(Deploying):
    beta: float
    deploy_as: Deploy
    beta_decay: float | None
    weights = "equal"
    breaks_privacy = None

    def __post_init__(self) -> None:
        check(0 <= self.beta <= 1, f"adabest: beta must be between 0 and 1, not {self.beta}")
        check(
            self.beta_decay is None or 0 < self.beta_decay < 1,
            f"adabest: beta_decay must be between 0 and 1, not {self.beta_decay}",
        )

    def init(self, setup: Setup) -> State:
        plateau = {"best": scalar("inf"), "waited": scalar(0), "cooling": scalar(0)}
        return {**super().init(setup), "beta": scalar(self.beta), "h_norm": scalar(0), **plateau}

    def step(self, state: State, record: Round) -> tuple[State, Tensor]:
        bar = record.theta - record.scaled
        h = float(state["beta"]) * (state["bar"] - bar)
        return {**self.averaged(state, bar), "h_norm": torch.linalg.vector_norm(h).double().cpu()}, bar - h

    def observe(self, state: State, record: Round) -> State:
        """Decay beta where |h| has stopped falling."""
        if self.beta_decay is None:
            return state
        if state["cooling"] > 0:
            return {**state, "cooling": state["cooling"] - 1, "best": torch.minimum(state["best"], state["h_norm"])}
        if state["h_norm"] < (1 - GAIN) * state["best"]:
            return {**state, "best": state["h_norm"], "waited": scalar(0)}
        if state["waited"] + 1 < PATIENCE:
            return {**state, "waited": state["waited"] + 1}
        return {**state, "beta": self.beta_decay * state["beta"], "waited": scalar(0), "cooling": scalar(PATIENCE)}

    def report(self, state: State) -> dict[str, Tensor]:
        return {"h_norm": state["h_norm"], "beta": state["beta"]}
