"""Between two averages RADFed is measured by the mean of its travelling models."""

import pytest
import torch
from torch import nn

import fedloom as fl


def run(method: str, eval_between: bool = False) -> fl.Result:
    torch.manual_seed(0)
    x, y = torch.randn(60, 4, dtype=torch.float64), torch.randint(3, (60,))
    federation = fl.Federation.from_arrays(
        [(x[i : i + 6], y[i : i + 6]) for i in range(0, 48, 6)], test=(x[48:], y[48:])
    )
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    local = fl.Local(batch_size=3, lr=0.2)
    return fl.fit(model, federation, method, rounds=1, clients_per_round=3, local=local, eval_between=eval_between)


@pytest.mark.parametrize("metric", ["loss", "accuracy"])
def test_mean_of_travelling_models(metric: str) -> None:
    """After s of S Works the models are where a round of s Works averages them: the cohorts are the same."""
    measured = run("radfed(redistributions=4)", eval_between=True).history[0]
    expected = [run(f"radfed(redistributions={s})").history[0][f"test_{metric}"] for s in (1, 2, 3, 4)]
    found = [*measured[f"between_test_{metric}"], measured[f"test_{metric}"]]
    assert found == pytest.approx(expected, rel=1e-12)
    assert len(set(expected)) > 1 or metric == "accuracy"


def test_nothing_to_measure_between() -> None:
    assert "between_test_loss" not in run("radfed(redistributions=4)").history[0]
    assert "between_test_loss" not in run("fedavg", eval_between=True).history[0]
