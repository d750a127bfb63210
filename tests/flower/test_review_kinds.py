"""Models of every precision, over in-process nodes and in the simulator."""

from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra flower")

import torch
from torch import nn

import fedloom as fl
from tests.flower.in_process import clients, mlp, served, simulated


def in_single() -> fl.Federation:
    pairs = [(x.float(), y) for x, y in (clients().client(k) for k in range(5))]
    return fl.Federation.from_arrays(pairs, test=pairs[0], classes=3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("method", ["scaffold", "adabest+fedglad"])
def test_what_is_sent_beside_a_model_may_be_of_its_kind(method: str, dtype: torch.dtype, tmp_path: Path) -> None:
    def model() -> nn.Module:
        return mlp().to(dtype)

    real = served(method, tmp_path, model=model, data=in_single())
    assert [row["answered"] for row in real.history] == [3] * 4
    assert torch.equal(real.params, simulated(method, model=model, data=in_single()).params)
