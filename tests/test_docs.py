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
def test_example(block: str) -> None:
    exec(compile(block, "example", "exec"), {})


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_method_pages_are_up_to_date() -> None:
    """`make docs` writes them. In a process of its own: other tests register methods too."""
    code = (
        "import sys; sys.path.insert(0, 'scripts')\n"
        "from method_pages import FOLDER, pages\n"
        "found = {path.name: path.read_text() for path in FOLDER.glob('*.md')}\n"
        "assert found == pages(), [n for n in pages() if found.get(n) != pages()[n]] + sorted(found.keys() - pages())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
