"""Between two averages RADFed is measured by the mean of its travelling models."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedloom as fl


def samples() -> tuple[Tensor, Tensor]:
    """The first 48 are the clients', the next 12 the test set's, the last 12 for validation."""
    torch.manual_seed(0)
    return torch.randn(72, 4, dtype=torch.float64), torch.randint(3, (72,))


def run(method: str, rounds: int = 1, validation: bool = False, lr: float = 0.2, **settings: Any) -> fl.Result:
    x, y = samples()
    federation = fl.Federation.from_arrays(
        [(x[i : i + 6], y[i : i + 6]) for i in range(0, 48, 6)],
        test=(x[48:60], y[48:60]),
        validation=(x[60:], y[60:]) if validation else None,
    )
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    local = fl.Local(batch_size=3, lr=lr)
    return fl.fit(model, federation, method, rounds=rounds, clients_per_round=3, local=local, **settings)


@pytest.mark.parametrize("key", ["test_loss", "test_accuracy", "validation_loss", "validation_accuracy"])
def test_mean_of_travelling_models(key: str) -> None:
    """After s of S Works the models are where a round of s Works averages them: the cohorts are the same."""
    measured = run("radfed(redistributions=4)", validation=True, eval_between=True).history[0]
    expected = [run(f"radfed(redistributions={s})", validation=True).history[0][key] for s in (1, 2, 3, 4)]
    assert [*measured[f"between_{key}"], measured[key]] == pytest.approx(expected, rel=1e-12)
    assert len(set(expected)) > 1 or "accuracy" in key


def test_nothing_to_measure_between() -> None:
    assert "between_test_loss" not in run("radfed(redistributions=4)").history[0]
    assert "between_test_loss" not in run("fedavg", eval_between=True).history[0]
    assert "between_validation_loss" not in run("radfed(redistributions=4)", eval_between=True).history[0]


@pytest.mark.parametrize("patience", [3, 6, 1000])
def test_patience_counts_looks_between(patience: int) -> None:
    """The result's model is that of the first of the best looks, on the way or not, and a run ends with the round in
    whose last look so many had gone by without a gain.
    """
    rounds = 12
    settings: dict[str, Any] = {"validation": True, "eval_between": True, "lr": 0.1}
    whole = run("radfed(redistributions=4)", rounds, **settings).history
    scores, tested = (
        [value for line in whole for value in [*line[f"between_{key}"], line[key]]]
        for key in ("validation_accuracy", "test_accuracy")
    )
    result = run("radfed(redistributions=4)", rounds, patience=patience, **settings)
    best = [scores.index(max(scores[: 4 * r])) for r in range(1, rounds + 1)]
    tired = [r for r in range(1, rounds + 1) if 4 * r - 1 - best[r - 1] >= patience]
    last = min([*tired, rounds])
    assert len(result.history) == last
    assert result.stopped == ("patience" if tired else "rounds")
    assert best[last - 1] % 4 != 3  # a look on the way
    x, y = samples()
    accuracy = (result.model.eval()(x[48:60]).argmax(1) == y[48:60]).double().mean()
    assert float(accuracy) == tested[best[last - 1]]
