"""The kernels of a cohort's LSTMs without a GPU; on one they are tested in tests/gpu."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Clients, times, samples, inputs, units; some tiles are cut off.
SIZES = [(2, 4, 5, 3, 6), (3, 3, 20, 8, 32), (1, 1, 2, 2, 3), (2, 3, 9, 100, 150), (2, 3, 130, 64, 64)]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, which PyTorch brings for GPUs")
def test_interpreted() -> None:
    asked = [sys.executable, "-m", "tests.models.interpreted", json.dumps(SIZES)]
    here = Path(__file__).parents[2]
    played = subprocess.run(
        asked, cwd=here, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=True
    )
    found = [json.loads(line) for line in played.stdout.splitlines()]
    assert len(found) == len(SIZES)
    for *errors, the_same in found:
        assert max(errors) < 1e-6
        assert the_same
