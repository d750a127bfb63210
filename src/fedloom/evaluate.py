"""How good is a model: loss and a metric, over one set or as the unweighted mean over held-out clients."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from fedloom.data.transforms import Preparation
from fedloom.errors import ConfigError, ModelError, nearest, out_of_memory
from fedloom.federation import Holdout, has_target
from fedloom.models.recurrent import is_recurrent
from fedloom.space import Buffers
from fedloom.task import Task

Score = Callable[[Tensor, Tensor], float]
BATCH = 1024
WIDE = 8192  # on a GPU, of a recurrent net: one step in time comes after the other, whether samples are few or many


def predicted(outputs: Tensor) -> Tensor:
    """Class labels from outputs: the largest column, or the sign where there is only one."""
    if outputs.dim() == 1 or outputs.shape[1] == 1:
        return (outputs > 0).long().reshape(len(outputs))
    return outputs.argmax(1)


def accuracy(guesses: Tensor, targets: Tensor) -> float:
    """Share of targets that are predicted."""
    guesses, targets = _where_told(guesses, targets)
    return int((guesses == targets).sum()) / len(targets) if len(targets) else float("nan")


def f1(guesses: Tensor, targets: Tensor) -> float:
    """F1 of each class, weighted by how often it occurs."""
    found, truth = (told.cpu().numpy() for told in _where_told(guesses, targets))
    total = 0.0
    for label, count in zip(*np.unique(truth, return_counts=True), strict=True):
        hits = np.sum((found == label) & (truth == label))
        total += count * 2 * hits / (count + np.sum(found == label))
    return float(total / len(truth)) if len(truth) else float("nan")


def auc(outputs: Tensor, targets: Tensor) -> float:
    """Area under the ROC curve; over more than two classes the mean of one against the rest. nan if one is missing."""
    if targets.numel() != len(targets):
        raise ValueError("it needs one target per sample")
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
    from scipy.stats import rankdata  # slow to import, and seldom needed

    hits = int(positive.sum())
    misses = len(positive) - hits
    if not hits or not misses:
        return float("nan")
    return float((rankdata(scores)[positive].sum() - hits * (hits + 1) / 2) / (hits * misses))


def _where_told(guesses: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Guesses and targets as vectors, without the places of a sequence that have no target."""
    told = has_target(targets).flatten() if targets.dim() > 1 else slice(None)
    return guesses.flatten()[told], targets.flatten()[told]


METRICS: dict[str, Score] = {"accuracy": accuracy, "f1": f1, "auc": auc}
OF_LABELS = (accuracy, f1)  # they read predicted labels; all others read the model's outputs


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
    preparation: Preparation
    name: str
    score: Score

    def measure(self, flat: Tensor, buffers: Buffers, holdout: Holdout, prefix: str) -> dict[str, float]:
        """`{prefix}_loss` and `{prefix}_{metric}`; targets that are no labels have no accuracy, f1 or auc."""
        outputs, losses = self._outputs(flat, buffers, holdout)
        offsets = [0, len(losses)] if holdout.offsets is None else holdout.offsets.tolist()
        found = {f"{prefix}_loss": float(np.mean([float(losses[a:b].mean()) for a, b in pairwise(offsets)]))}
        if self._scores(holdout):
            found[f"{prefix}_{self.name}"] = _mean(self._by_client(outputs, holdout.y, offsets))
        return found

    def by_client(self, flat: Tensor, buffers: Buffers, holdout: Holdout) -> list[float]:
        """The metric on each client that was held out; nan where it is undefined."""
        assert holdout.offsets is not None  # nosec B101  # for the type checker
        if not self._scores(holdout):
            return [float("nan")] * (len(holdout.offsets) - 1)
        return self._by_client(self._outputs(flat, buffers, holdout)[0], holdout.y, holdout.offsets.tolist())

    def _scores(self, holdout: Holdout) -> bool:
        """Does the metric read these targets?"""
        return not holdout.y.is_floating_point() or self.score not in METRICS.values()

    def _by_client(self, outputs: Tensor, y: Tensor, offsets: list[int]) -> list[float]:
        broken = outputs < 0 if self.score in OF_LABELS else ~torch.isfinite(outputs)
        if self.score in METRICS.values() and bool(broken.any()):
            return [float("nan")] * (len(offsets) - 1)  # a model that has diverged predicts nothing
        return [self._scored(outputs[a:b], y[a:b]) for a, b in pairwise(offsets)]

    def _scored(self, outputs: Tensor, targets: Tensor) -> float:
        try:
            return float(self.score(outputs, targets))
        except Exception as error:
            raise ModelError(f"the metric {self.name} failed: {error}") from error

    @torch.no_grad()
    def _outputs(self, flat: Tensor, buffers: Buffers, holdout: Holdout) -> tuple[Tensor, Tensor]:
        self.task.model.eval()
        width = WIDE if flat.is_cuda and is_recurrent(self.task.model) else BATCH
        done: list[tuple[Tensor, Tensor]] = []
        at = 0
        while at < len(holdout.x) or not done:
            try:
                done.append(self._some(flat, buffers, holdout.x[at : at + width], holdout.y[at : at + width]))
                at += width
                continue
            except RuntimeError as error:
                if not out_of_memory(error) or width == 1:
                    raise
            width //= 2  # outside of the handler, whose traceback holds on to memory
        outputs, losses = (torch.cat(parts) for parts in zip(*done, strict=True))
        return outputs, losses.double()

    def _some(self, flat: Tensor, buffers: Buffers, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        found = self.task.outputs(flat, buffers, self.task.laid_out(self.preparation.clean(x, flat.dtype)))
        return _labels(found) if self.score in OF_LABELS else found, self.task.loss(found, y)


def _labels(outputs: Tensor) -> Tensor:
    """Predicted labels, -1 where an output is not finite: of many classes they are all that fits into memory."""
    guesses = predicted(outputs)
    finite = torch.isfinite(outputs)
    return guesses.where(finite if outputs.dim() == 1 else finite.all(1), -1)


def _mean(values: list[float]) -> float:
    """The mean over clients; a client on whom a metric is undefined does not count."""
    defined = [v for v in values if not np.isnan(v)]
    return float(np.mean(defined)) if defined else float("nan")
