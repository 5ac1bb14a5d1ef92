"""Keeps the module list of docs/architecture.md equal to the modules' own docstrings.

python scripts/module_index.py            rewrite the list
python scripts/module_index.py --check    exit 1 if it is out of date
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "architecture.md"
PACKAGES = (ROOT / "ftlaunch", ROOT / "providers" / "ftproviders", ROOT / "engine" / "ftengine")
BEGIN, END = "<!-- modules: scripts/module_index.py -->\n", "<!-- end of modules -->\n"


def summary(path: Path) -> str:
    """The first sentence of a module's docstring, on one line; empty without one."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    sentence = re.split(r"(?<=[.:])\s(?=[A-Z`])", paragraph, maxsplit=1)[0]
    return sentence.rstrip(".:")


def modules(package: Path) -> list[Path]:
    return sorted(path for path in package.glob("*.py") if path.name != "__init__.py")


def sections() -> Iterator[str]:
    for top in PACKAGES:
        folders = [top, *sorted(path.parent for path in top.rglob("__init__.py") if path.parent != top)]
        for folder in folders:
            found = modules(folder)
            if found:
                about = summary(folder / "__init__.py")
                lines = [f"### {folder.relative_to(top.parent)}", "", *([f"{about}.", ""] if about else [])]
                yield "\n".join([*lines, *(f"- `{path.name}`: {summary(path)}" for path in found), ""])


def with_index(document: str) -> str:
    """The document with the list between the two markers made anew."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n" + "\n".join(sections()) + "\n" + END + after


def main() -> int:
    there = DOCUMENT.read_text(encoding="utf-8")
    wanted = with_index(there)
    if "--check" not in sys.argv[1:]:
        DOCUMENT.write_text(wanted, encoding="utf-8")
    elif there != wanted:
        print("docs/architecture.md is out of date; run: python scripts/module_index.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
