"""The command line, in this process or in one of its own."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fedloom as fl
from fedloom.cli import main

SOURCE = str(Path(fl.__file__).parent.parent)  # other processes run the same code, from wherever they start
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONPATH": SOURCE}


def fedloom(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """In this process: a new one takes seconds to import everything."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(cwd or Path.cwd()):
        patch.setattr(sys, "argv", ["fedloom", *arguments])
        patch.setattr("fedloom.cli._Stderr.said", set())  # what earlier commands have said once
        patch.setenv("COLUMNS", ENV["COLUMNS"])
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
            main()
    code = ended.value.code
    assert isinstance(code, int)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def fedloom_alone(*arguments: str, **how: Any) -> subprocess.CompletedProcess[str]:
    """In a process of its own."""
    command = [sys.executable, "-m", "fedloom", *arguments]
    return subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=120, **how)
