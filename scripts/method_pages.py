"""Write docs/methods/: one page per method, from what its file says, and an index."""

from pathlib import Path

import fedloom as fl
from fedloom.report.method_page import method_page

FOLDER = Path(__file__).parent.parent / "docs" / "methods"


def pages() -> dict[str, str]:
    """File name to text."""
    entries = fl.list_methods()
    lines = [f"| [{e.name}]({e.name}.md) | `{e.signature}` | {e.about} | {e.paper} |" for e in entries]
    head = "# Methods\n\nEverything that can stand in a method's text, joined with `+`.\n\n"
    index = f"{head}| method | how it is written | what it does | paper |\n| --- | --- | --- | --- |\n"
    return {"README.md": index + "\n".join(lines) + "\n", **{f"{e.name}.md": method_page(e.name) for e in entries}}


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    found = pages()
    for old in FOLDER.glob("*.md"):
        if old.name not in found:
            old.unlink()
    for name, text in found.items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
