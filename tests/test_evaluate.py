"""What counts in a score: targets that are none, clients that have none, a model that has diverged on some."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score
from torch import Tensor, nn

import fedloom as fl
from fedloom.training import Training


class Bytes(nn.Module):
    """A score for every value of the next byte, at every place: [B, T] -> [B, 256, T]."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.table(x.long())
        return answer.transpose(1, 2)


def last(model: nn.Module, federation: fl.Federation, **options: object) -> dict[str, float]:
    local = fl.Local(lr=0.0)
    return fl.fit(model, federation, rounds=1, local=local, **options).history[-1]  # type: ignore[arg-type]


def test_byte_156_is_a_target() -> None:
    """156 and -100 are the same byte."""
    torch.manual_seed(0)
    model, x = Bytes(), torch.full((6, 4), 156, dtype=torch.uint8)
    made = fl.Federation.from_tensor(x, x, [0, 3, 6], test=(x, x), classes=256)
    found = last(model, made)
    outputs = model(x).detach()
    assert found["test_loss"] == pytest.approx(float(nn.functional.cross_entropy(outputs, x.long())), rel=1e-6)
    assert found["test_accuracy"] == float((outputs.argmax(1) == x).double().mean())


@pytest.mark.parametrize("metric", ["accuracy", "f1"])
def test_places_without_a_target_do_not_count(metric: str) -> None:
    torch.manual_seed(0)
    model = Bytes()
    x = torch.randint(0, 5, (9, 4), generator=torch.Generator().manual_seed(1))
    y = torch.randint(0, 5, (9, 4), generator=torch.Generator().manual_seed(2))
    y[y == 3] = -100
    y[6:] = -100  # the last client has nothing to predict
    clients = [(x[a:b], y[a:b]) for a, b in pairwise((0, 3, 6, 9))]
    made = fl.Federation.from_arrays(clients[:2], test=clients, classes=256)
    found = last(model, made, metric=metric)
    scores, losses = [], []
    for inputs, targets in clients:
        told = targets != -100
        outputs = model(inputs).detach()
        each = nn.functional.cross_entropy(outputs, targets, reduction="none", ignore_index=-100).sum(1)
        losses.append(float((each / told.sum(1).clamp(min=1)).mean()))
        guesses, truth = outputs.argmax(1)[told].numpy(), targets[told].numpy()
        if len(truth):
            labels = np.unique(truth)
            weighted = f1_score(truth, guesses, labels=labels, average="weighted", zero_division=0)
            scores.append(weighted if metric == "f1" else (guesses == truth).mean())
    assert found["test_loss"] == pytest.approx(np.mean(losses), rel=1e-6)
    assert found[f"test_{metric}"] == pytest.approx(np.mean(scores), rel=1e-9)


class Explosive(nn.Module):
    """Not finite where an input is large."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.linear(x) + torch.where(x > 10, torch.inf, 0.0)
        return answer


@pytest.mark.parametrize("metric", ["accuracy", "f1", "auc"])
def test_a_model_that_fails_on_one_client_has_no_score(metric: str) -> None:
    good, bad = ([[0.0], [1.0]], [0, 1]), ([[0.0], [50.0]], [0, 1])
    pairs = [(torch.tensor(x), torch.tensor(y)) for x, y in (good, bad)]
    found = last(Explosive(), fl.Federation.from_arrays(pairs[:1], test=pairs), metric=metric)
    assert np.isnan(found[f"test_{metric}"])


def test_auc_needs_one_target_per_sample() -> None:
    x = torch.zeros(4, 3, dtype=torch.int64)
    made = fl.Federation.from_tensor(x, x, [0, 4], test=(x, x), classes=256)
    with pytest.raises(fl.ModelError, match="auc failed: it needs one target per sample"):
        last(Bytes(), made, metric="auc")


class Narrow(nn.Linear):
    """There is memory for so many samples at once when it is tested."""

    def __init__(self, most: int) -> None:
        super().__init__(4, 3)
        self.most = most
        self.widths: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.widths.append(len(x))
            if len(x) > self.most:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(x)


def test_a_batch_that_does_not_fit_is_halved() -> None:
    """And the narrower one is kept; where not even one sample fits, the error is told."""
    torch.manual_seed(0)
    model, generator = Narrow(300), torch.Generator().manual_seed(0)
    x, y = torch.randn(1500, 4, generator=generator), torch.randint(0, 3, (1500,), generator=generator)
    made = fl.Federation.from_tensor(x[:8], y[:8], [0, 4, 8], test=(x, y), classes=3)
    local = fl.Local(lr=0.0)
    run = Training(model, made, "fedavg", rounds=1, local=local, engine="loop", device="cpu")
    tested = run.simulation.task.model
    assert isinstance(tested, Narrow)
    tested.widths.clear()
    found = run.run().history[-1]
    assert tested.widths == [1024, 512, 256, 256, 256, 256, 256, 220]
    outputs = nn.functional.linear(x, model.weight, model.bias).detach()
    assert found["test_accuracy"] == float((outputs.argmax(1) == y).double().mean())
    assert found["test_loss"] == pytest.approx(float(nn.functional.cross_entropy(outputs.double(), y)), rel=1e-6)
    tested.most = 0
    with pytest.raises(torch.OutOfMemoryError):
        run.simulation.evaluate(run.state)
