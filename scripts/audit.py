"""Are holes known in what is installed? pip-audit asks the advisory service of the Python Package Index.

pip-audit is installed when it is first asked for. The end is 1 if holes are known, and 2 without a network.
"""

import importlib.util
import json
import subprocess  # nosec B404  # never with a shell
import sys

PYTHON = [sys.executable, "-m"]


def main() -> int:
    if importlib.util.find_spec("pip_audit") is None:
        quiet = ["--quiet", "--disable-pip-version-check", "--retries", "1", "--timeout", "15"]
        done = _run([*PYTHON, "pip", "install", *quiet, "pip-audit"])
        if done.returncode:
            return _complain(f"pip-audit could not be installed: {_last(done.stderr)}")
    done = _run([*PYTHON, "pip_audit", "--local", "--format", "json", "--progress-spinner", "off", "--timeout", "15"])
    try:
        found = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        return _complain(f"the advisory service could not be asked: {_last(done.stderr)}")
    holes = [(package, hole) for package in found for hole in package.get("vulns", [])]
    for package, hole in holes:
        fixed = f"fixed in {', '.join(hole['fix_versions'])}" if hole["fix_versions"] else "not fixed yet"
        sys.stdout.write(f"{package['name']} {package['version']}: {hole['id']}, {fixed}\n")
    skipped = [package["name"] for package in found if "skip_reason" in package]
    if len(skipped) > len(found) // 2:  # pip-audit would call this a success
        return _complain(f"the advisory service answered for {len(found) - len(skipped)} of {len(found)} packages only")
    sys.stdout.write(f"{len(holes)} known holes in {len(found) - len(skipped)} packages\n")
    if skipped:
        sys.stdout.write(f"not asked about: {', '.join(skipped)}\n")
    return 1 if holes else 0


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True)  # nosec B603  # pip and pip-audit, nothing of others


def _last(text: str) -> str:
    """The line that says why; what comes before it is the way there."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"


def _complain(message: str) -> int:
    sys.stderr.write(f"audit: {message}; it needs a network\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
