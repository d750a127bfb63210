"""The examples in the documents run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{path.relative_to(ROOT)}-{i}")
    for path in DOCUMENTS
    for i, block in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_example(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    exec(compile(block, "example", "exec"), {})


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_reference_pages_are_up_to_date() -> None:
    """`make docs` writes them. In a process of its own: other tests register methods too."""
    code = (
        "import sys; sys.path.insert(0, 'scripts')\n"
        "from reference_pages import DOCS, pages\n"
        "wanted = pages()\n"
        "paths = {*(DOCS / name for name in wanted), *(DOCS / 'methods').glob('*.md')}\n"
        "found = {str(path.relative_to(DOCS)): path.read_text() for path in paths if path.exists()}\n"
        "assert found == wanted, [n for n in wanted if found.get(n) != wanted[n]] + sorted(found.keys() - wanted)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_all_tests_can_be_collected_together() -> None:
    """Modules in folders that are no packages are imported by their names alone."""
    modules = [path for path in (ROOT / "tests").rglob("test_*.py") if not (path.parent / "__init__.py").exists()]
    names = [path.name for path in modules]
    assert sorted(names) == sorted(set(names))
