"""The documentation against the code it describes: nothing named that is not there, nothing there that is not named."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PYTHON = [
    path
    for top in ("ftlaunch", "engine", "providers", "tests", "scripts")
    for path in sorted((ROOT / top).rglob("*.py"))
]
SHELL = [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"]
VARIABLE = re.compile(r"FT_[A-Z_]+")


def variables_in_code() -> set[str]:
    """Names that are whole string constants in Python, and all that shell scripts mention."""
    found = set()
    for path in PYTHON:
        if path == Path(__file__):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and VARIABLE.fullmatch(node.value):
                found.add(node.value)
            elif isinstance(node, ast.keyword) and node.arg and VARIABLE.fullmatch(node.arg):
                found.add(node.arg)
    for path in SHELL:
        found.update(VARIABLE.findall(path.read_text(encoding="utf-8")))
    return found


def test_every_environment_variable_is_documented_and_every_documented_one_exists():
    documented = set(VARIABLE.findall((ROOT / "docs" / "environment.md").read_text(encoding="utf-8")))
    assert documented == variables_in_code()


def test_native_code_reads_no_environment():
    assert not [path.name for path in (ROOT / "csrc").iterdir() if "getenv" in path.read_text(encoding="utf-8")]


def test_architecture_lists_every_module_with_its_own_sentence():
    command = [sys.executable, str(ROOT / "scripts" / "module_index.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_module_begins_with_a_sentence():
    listed = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert re.findall(r"^- `(\w+\.py)`: *$", listed, re.MULTILINE) == []


def test_architecture_lists_every_native_source():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    sources = {path.name for path in (ROOT / "csrc").iterdir() if path.suffix in {".cpp", ".inl"}}
    assert sources == set(re.findall(r"`(\w+\.(?:cpp|inl))`", text))


def test_files_named_in_the_way_of_a_request_exist():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("<!-- modules")[0]
    named = set(re.findall(r"`((?:[\w<>]+/)+[\w<>.]*)`", text))
    assert named
    roots = (ROOT, ROOT / "engine" / "ftengine", ROOT / "providers", ROOT / "engine")
    for name in named:
        pattern = re.sub(r"<\w+>", "*", name)
        assert any(list(root.glob(pattern)) for root in roots), name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (document.parent / target).exists(), target


def test_index_links_every_document():
    linked = set(re.findall(r"\]\((\w+\.md)\)", (ROOT / "docs" / "index.md").read_text(encoding="utf-8")))
    assert linked == {path.name for path in DOCUMENTS[1:]} - {"index.md"}


def test_readme_begins_with_two_commands_that_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    first_block = re.search(r"```bash\n(.*?)```", text, re.DOTALL)
    assert first_block is not None
    commands = [line.partition("#")[0].split() for line in first_block[1].splitlines() if line.strip()]
    assert [command[0] for command in commands] == ["bash", "bash"]
    assert all((ROOT / command[1]).is_file() for command in commands)
    assert f"bash {commands[1][1]}" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_commands_in_documents_exist():
    """Each `ft COMMAND` that a document tells to type is one that `ft` has."""
    from ftlaunch.cli.app import COMMANDS

    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        typed = re.findall(r"(?:^|`)ft ([a-z]+)", text, re.MULTILINE)
        assert set(typed) <= set(COMMANDS), document.name


def test_the_same_node_is_asked_for_everywhere():
    """By the doctor, the scripts and the documents."""
    asked = {
        "README.md": r"Node ≥ (\d+)",
        "docs/troubleshooting.md": r"Install Node (\d+) or newer",
        "scripts/common.sh": r"oldest=(\d+)",
        "ftlaunch/machine/agents.py": r"OLDEST = (\d+)",
    }
    found = {name: re.findall(text, (ROOT / name).read_text(encoding="utf-8")) for name, text in asked.items()}
    assert all(found.values()), found
    assert len({number for numbers in found.values() for number in numbers}) == 1, found
