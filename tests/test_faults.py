"""What goes wrong around a run for real: memory that is not there, a compiler that is killed."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}

TIGHT = """
import logging, resource, sys, torch, fedloom as fl
logging.basicConfig(stream=sys.stdout, format="%(message)s")
torch.manual_seed(0)
x = torch.randn(400, 50)
data = fl.Federation.from_arrays([(x[i::20], torch.arange(20) % 2) for i in range(20)])
model = torch.nn.Sequential(torch.nn.Linear(50, 20_000), torch.nn.ReLU(), torch.nn.Linear(20_000, 2))

def run(clients=20):
    local = fl.Local(batch_size=20)
    return fl.fit(model, data, "fedavg", 1, clients, local, engine="vector", compile=False).params

wanted = run()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
for room in range(700, 0, -50):  # MB; the updates alone are 85
    resource.setrlimit(resource.RLIMIT_AS, (used + room * 1_000_000, resource.RLIM_INFINITY))
    try:
        found = run()
    except fl.RunError as error:
        print("refused:", error)
        break
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6), room
    print("done")
"""


def python(code: str, **env: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env={**ENV, **env}, capture_output=True, text=True, timeout=300)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the size of a process can't be read here")
@pytest.mark.long
def test_memory_that_runs_out() -> None:
    """Ever less of it: first as it is, then in halves with the same result, and in the end one sentence."""
    # What is freed goes back at once, so that the size of the process says what it needs.
    said = python(TIGHT, MALLOC_MMAP_THRESHOLD_="65536")
    assert said.returncode == 0, said.stderr
    lines = said.stdout.splitlines()
    assert lines[0] == "done"
    halved = [i for i, line in enumerate(lines) if "do not fit into memory together; trying 10 at a time" in line]
    assert halved
    assert "done" in lines[halved[0] :]
    assert lines[-1].startswith("refused: a single client's training does not fit into the memory of cpu")


KILLED = """
import logging, sys, torch, fedloom as fl
logging.basicConfig(stream=sys.stdout, format="%(message)s")
x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
data = fl.Federation.from_arrays([(x[i::4], torch.arange(10) % 2) for i in range(4)])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
plain, compiled = (fl.fit(model, data, rounds=3, engine="vector", compile=c).params for c in (False, True))
assert torch.equal(plain, compiled)
print("the same")
"""


@pytest.mark.long
def test_compiler_that_is_killed(tmp_path: Path) -> None:
    """The compiler is a process of its own, and the first that a machine without memory kills: steps go on without."""
    compiler = tmp_path / "g++"
    compiler.write_text(
        f'#!/bin/sh\necho x >> {tmp_path}/started\ncase "$*" in *-c*|*-o*) kill -9 $$;; esac\nexec g++ "$@"\n'
    )
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    said = python(
        KILLED, CXX=str(compiler), TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"), FEDLOOM_CACHE=str(tmp_path)
    )
    assert said.returncode == 0, said.stderr
    assert (tmp_path / "started").exists()
    assert "torch.compile failed, so steps run without it" in said.stdout
    assert said.stdout.splitlines()[-1] == "the same"
