"""Resolve fedloom with every extra and its tools in one go.

Without arguments: check that constraints.txt still is such a resolution. With --write: resolve anew and write it.
"""

import json
import re
import subprocess  # nosec B404  # never with a shell
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
LOCK = ROOT / "constraints.txt"
HEAD = "# One resolution of fedloom with every extra and the development tools (Python 3.11, Linux).\n"
PINNED = ["torch==2.13.0", "flwr[simulation]==1.41.0"]  # flwr 1.42.0 asks for a certifi that no index has


def wanted() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [name for group in project["optional-dependencies"].values() for name in group]
    return [*PINNED, *project["dependencies"], *extras]


def resolve(constraints: Path | None) -> list[str]:
    """What pip would install, as name==version lines."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--report", str(report), *(["-c", str(constraints)] if constraints else []), *wanted()]
        subprocess.run(command, check=True)  # nosec B603  # pip, with names out of pyproject.toml
        found = json.loads(report.read_text())["install"]
    names = {re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower(): item["metadata"]["version"] for item in found}
    return [f"{name}=={version.partition('+')[0]}" for name, version in sorted(names.items())]


def main() -> int:
    if "--write" in sys.argv:
        LOCK.write_text(HEAD + "\n".join(resolve(None)) + "\n")
        return 0
    locked = [line for line in LOCK.read_text().splitlines() if not line.startswith("#")]
    missing = sorted(set(resolve(LOCK)) - set(locked))
    if missing:
        sys.stderr.write(f"constraints.txt lacks {', '.join(missing)}; run make lock\n")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
