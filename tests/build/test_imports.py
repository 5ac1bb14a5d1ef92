"""The direction of imports, read from the sources: no circle, nothing up the floors, no torch where none belongs."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOPS = {
    "ftlaunch": ROOT / "ftlaunch",
    "ftproviders": ROOT / "providers/ftproviders",
    "ftengine": ROOT / "engine/ftengine",
}

# room -> rooms it may import, besides itself; a room is a package of ftengine, or one of its files in its root
COMMON = {"atomic", "core", "config", "conversation", "errors", "private", "switches", "wire"}
FLOORS = {
    "api": {"dialect", "leases", "weights", *COMMON},
    "dialect": {"weights", *COMMON},
    "leases": {"errors", "private"},
    "bench": {
        "cache",
        "dialect",
        "experts",
        "formats",
        "kernels",
        "layers",
        "memory",
        "models",
        "scheduler",
        "weights",
        *COMMON,
    },
    "process": {"scheduler", *COMMON},
    "scheduler": {"cache", "experts", "kernels", "memory", "models", "weights", *COMMON},
    "models": {"_native", "layers", "experts", "kernels", "formats", "weights", *COMMON},
    "layers": {"experts", "kernels", "formats", "core"},
    "experts": {"atomic", "kernels", "formats", "memory", "weights", "errors", "locks", "private", "switches"},
    "memory": {"formats", "weights", *COMMON},
    "cache": {"core", "errors", "private"},
    "weights": {"core", "errors", "formats"},
    "formats": {"_native", "errors"},
    "kernels": {"_native", "atomic", "config", "errors", "formats", "private"},
    "wire": {"core"},
    "conversation": {"core", "errors"},
    "config": {"errors", "core"},
    "atomic": set(),
    "core": set(),
    "errors": set(),
    "locks": {"private"},
    "private": set(),
    "switches": {"errors"},
}
TORCH_FREE = (
    "ftlaunch",
    "ftproviders",
    "ftengine.api",
    "ftengine.dialect",
    "ftengine.memory",
    *(f"ftengine.{name}" for name in COMMON),
)


def modules() -> dict[str, Path]:
    found = {}
    for top, folder in TOPS.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((top, *(part for part in parts if part != "__init__")))] = path
    return found


MODULES = modules()


def imported(path: Path) -> list[tuple[str, bool]]:
    """Every import in a file, inside functions too: (dotted name, whether it runs when the module is imported)."""
    found = []

    def visit(node: ast.AST, at_import: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            at_import = False
        if isinstance(node, ast.Import):
            found.extend((alias.name, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"{path}: relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.append((full if full in MODULES else node.module, at_import))
        for child in ast.iter_child_nodes(node):
            visit(child, at_import and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))

    visit(ast.parse(path.read_text(encoding="utf-8")), True)
    return found


def test_no_circle():
    graph = {
        name: {target for target, _ in imported(path) if target in MODULES} - {name} for name, path in MODULES.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other: {' -> '.join(error.args[1])}")


def test_distributions_import_one_way():
    may = {"ftlaunch": {"ftproviders", "ftengine"}, "ftengine": set(), "ftproviders": set()}
    for name, path in MODULES.items():
        top = name.partition(".")[0]
        for target, _ in imported(path):
            other = target.partition(".")[0]
            assert other not in TOPS or other == top or other in may[top], f"{name} imports {target}"


def test_rooms_of_the_engine_import_downwards():
    for name, path in MODULES.items():
        if name.startswith("ftengine."):
            room = name.split(".")[1]
            for target, _ in imported(path):
                if target.startswith("ftengine."):
                    other = target.split(".")[1]
                    assert other == room or other in FLOORS[room], f"{name} imports {target}"


def test_no_torch_in_the_front():
    """Nothing that the front or a command imports at start reaches torch, followed through our own modules."""
    heavy = {"torch", "transformers", "safetensors.torch"}

    def reaches(name: str, seen: set[str]) -> str | None:
        seen.add(name)
        for target, at_import in imported(MODULES[name]):
            if at_import and (target in heavy or target.split(".")[0] in heavy):
                return f"{name} imports {target}"
            if at_import and target in MODULES and target not in seen:
                found = reaches(target, seen)
                if found:
                    return f"{name} -> {found}"
        return None

    light = [name for name in MODULES if name.startswith(TORCH_FREE)]
    assert light
    assert [found for found in (reaches(name, set()) for name in light) if found] == []
