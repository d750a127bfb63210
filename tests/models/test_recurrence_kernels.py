"""The kernels of a cohort's LSTMs without a GPU; on one they are tested in tests/gpu."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SIZES = [(2, 4, 5, 6), (3, 3, 20, 32), (1, 1, 2, 3), (2, 3, 9, 600)]  # clients, times, samples, units; some are cut off


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, which PyTorch brings for GPUs")
def test_interpreted() -> None:
    asked = [sys.executable, "-m", "tests.models.interpreted", json.dumps(SIZES)]
    here = Path(__file__).parents[2]
    played = subprocess.run(
        asked, cwd=here, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=True
    )
    found = [json.loads(line) for line in played.stdout.splitlines()]
    assert len(found) == len(SIZES)
    for of_states, of_gradient, the_same in found:
        assert of_states < 1e-6
        assert of_gradient < 1e-6
        assert the_same
