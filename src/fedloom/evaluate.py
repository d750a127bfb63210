"""How good is a model: loss and a metric, over one set or as the unweighted mean over held-out clients."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor

from fedloom.errors import ConfigError, ModelError, nearest
from fedloom.federation import Holdout
from fedloom.space import Buffers
from fedloom.task import Task

Score = Callable[[Tensor, Tensor], float]
BATCH = 1024


def predicted(outputs: Tensor) -> Tensor:
    """Class labels from outputs: the largest column, or the sign where there is only one."""
    if outputs.dim() == 1 or outputs.shape[1] == 1:
        return (outputs > 0).long().reshape(len(outputs))
    return outputs.argmax(1)


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Share of targets that are predicted."""
    guesses = predicted(outputs)
    return int((guesses == targets.reshape(guesses.shape)).sum()) / guesses.numel()


def f1(outputs: Tensor, targets: Tensor) -> float:
    """F1 of each class, weighted by how often it occurs."""
    guesses, truth = predicted(outputs).cpu().numpy().ravel(), targets.cpu().numpy().ravel()
    total = 0.0
    for label, count in zip(*np.unique(truth, return_counts=True), strict=True):
        hits = np.sum((guesses == label) & (truth == label))
        total += count * 2 * hits / (count + np.sum(guesses == label))
    return float(total / len(truth))


def auc(outputs: Tensor, targets: Tensor) -> float:
    """Area under the ROC curve; over more than two classes the mean of one against the rest. nan if one is missing."""
    scores, truth = outputs.double().cpu(), targets.reshape(len(targets)).cpu().numpy()
    if scores.dim() == 1 or scores.shape[1] == 1:
        return _binary_auc(scores.reshape(-1).numpy(), truth == 1)
    if scores.shape[1] == 2:
        return _binary_auc((scores[:, 1] - scores[:, 0]).numpy(), truth == 1)
    areas = []
    for c in np.unique(truth):  # log-odds of c: they order as its probability does, and never saturate
        others = torch.cat([scores[:, :c], scores[:, c + 1 :]], 1).logsumexp(1)
        areas.append(_binary_auc((scores[:, c] - others).numpy(), truth == c))
    return float(np.mean(areas))


def _binary_auc(scores: np.ndarray, positive: np.ndarray) -> float:
    hits = int(positive.sum())
    misses = len(positive) - hits
    if not hits or not misses:
        return float("nan")
    return float((rankdata(scores)[positive].sum() - hits * (hits + 1) / 2) / (hits * misses))


METRICS: dict[str, Score] = {"accuracy": accuracy, "f1": f1, "auc": auc}


def find_metric(metric: str | Score) -> tuple[str, Score]:
    """The name under which a metric stands in the history, and its function."""
    if callable(metric):
        name = getattr(metric, "__name__", "metric").strip("<>")
        if name == "loss":
            raise ConfigError("a metric called 'loss' would hide the loss in the history; rename the function")
        return name, metric
    if metric not in METRICS:
        raise ConfigError(f"unknown metric {metric!r}: {nearest(str(metric), METRICS)}")
    return metric, METRICS[metric]


@dataclass(frozen=True)
class Evaluator:
    """Measures vectors [P] of one task."""

    task: Task
    name: str
    score: Score

    def measure(self, flat: Tensor, buffers: Buffers, holdout: Holdout, prefix: str) -> dict[str, float]:
        """`{prefix}_loss` and `{prefix}_{metric}`; targets that are no labels have no accuracy, f1 or auc."""
        outputs, losses = self._outputs(flat, buffers, holdout)
        offsets = [0, len(losses)] if holdout.offsets is None else holdout.offsets.tolist()
        clients = list(pairwise(offsets))
        found = {f"{prefix}_loss": float(np.mean([float(losses[a:b].mean()) for a, b in clients]))}
        if not holdout.y.is_floating_point() or self.score not in METRICS.values():
            scores = [self._scored(outputs[a:b], holdout.y[a:b]) for a, b in clients]
            found[f"{prefix}_{self.name}"] = _mean(scores)
        return found

    def _scored(self, outputs: Tensor, targets: Tensor) -> float:
        if self.score in METRICS.values() and not bool(torch.isfinite(outputs).all()):
            return float("nan")  # a model that has diverged predicts nothing
        try:
            return float(self.score(outputs, targets))
        except Exception as error:
            raise ModelError(f"the metric {self.name} failed: {error}") from error

    @torch.no_grad()
    def _outputs(self, flat: Tensor, buffers: Buffers, holdout: Holdout) -> tuple[Tensor, Tensor]:
        self.task.model.eval()
        outputs, losses = [], []
        for x, y in zip(torch.split(holdout.x, BATCH), torch.split(holdout.y, BATCH), strict=True):
            outputs.append(self.task.outputs(flat, buffers, x))
            losses.append(self.task.loss(outputs[-1], y))
        return torch.cat(outputs), torch.cat(losses).double()


def _mean(values: list[float]) -> float:
    """The mean over clients; a client on whom a metric is undefined does not count."""
    defined = [v for v in values if not np.isnan(v)]
    return float(np.mean(defined)) if defined else float("nan")
