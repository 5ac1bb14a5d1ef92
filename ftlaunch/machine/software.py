"""What is installed: Python, ft, PyTorch and what else ft needs. Nothing of it is imported."""

from __future__ import annotations

import importlib.util
import platform
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from ftlaunch.machine.probe import Asked
from ftlaunch.machine.verdict import Finding

AGAIN = "pip install --force-reinstall ftlaunch"
BOUND = re.compile(r"(>=|<=|==|!=|<|>)\s*(\d[\d.]*)")


def probe(asked: Asked) -> Iterator[Finding]:
    yield system()
    yield python()
    yield torch()
    yield needs()


def system() -> Finding:
    name, release = platform.system(), platform.release()
    data = {"system": name, "release": release, "machine": platform.machine(), "libc": " ".join(platform.libc_ver())}
    return Finding("software.system", "system", f"{name} {release}, {platform.machine()}", data=data)


def python() -> Finding:
    own = version("ftlaunch")
    value = f"{platform.python_version()}, ft {own or 'from a folder, not installed'}"
    return Finding("software.python", "Python", value, data={"python": platform.python_version(), "ft": own})


def torch() -> Finding:
    """With the CUDA that it was built for, read from its files."""
    found, triton = version("torch"), version("triton")
    cuda = torch_cuda()
    data = {"torch": found, "cuda": cuda, "triton": triton, "fla_core": version("fla-core")}
    if found is None:
        cost = "ft serve, checkpoint and bench cannot compute; ft launch needs a server elsewhere"
        return Finding("software.torch", "PyTorch", "not installed", "bad", cost, AGAIN, data)
    value = f"{found}, for {'CUDA ' + cuda if cuda else 'the CPU'}; Triton {triton or 'not installed'}"
    return Finding("software.torch", "PyTorch", value, data=data)


def needs() -> Finding:
    """ft's requirements, as its package states them, against what is there."""
    try:
        required = metadata.requires("ftlaunch") or []
    except metadata.PackageNotFoundError:
        return Finding("software.needs", "requirements", "not known: ft is not installed", data={"wrong": None})
    wrong = [text for line in required if "extra ==" not in line and (text := _lacking(line))]
    if not wrong:
        return Finding("software.needs", "requirements", "all there", data={"wrong": []})
    cost = "commands that use it fail or misbehave"
    return Finding("software.needs", "requirements", "; ".join(wrong[:3]), "bad", cost, AGAIN, {"wrong": wrong})


def version(package: str) -> str | None:
    try:
        found: Any = metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
    return str(found) if found else None


def torch_cuda() -> str | None:
    """ "13.0"; None for a build without CUDA, or without torch."""
    try:
        spec = importlib.util.find_spec("torch")
        text = (Path(spec.origin).parent / "version.py").read_text() if spec and spec.origin else ""
    except (OSError, ValueError, ImportError):
        return None
    found = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return found.group(1) if found else None


def _lacking(requirement: str) -> str:
    """What is wrong with one, such as "torch 2.10.0, >=2.11 is needed"; empty if nothing is."""
    stated, _, marker = requirement.partition(";")
    named = re.match(r"\s*([A-Za-z0-9._-]+)", stated)
    if named is None or ("platform_system" in marker and platform.system() not in marker):
        return ""
    name, found = named.group(1), version(named.group(1))
    if found is None:
        return f"{name} is missing"
    for relation, bound in BOUND.findall(stated[named.end() :]):
        if not _holds(_numbers(found), relation, _numbers(bound)):
            return f"{name} {found}, {relation}{bound} is needed"
    return ""


def _numbers(text: str) -> tuple[int, ...]:
    leading = re.match(r"\d+(\.\d+)*", text)
    numbers = [int(part) for part in leading.group().split(".")] if leading else [0]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _holds(found: tuple[int, ...], relation: str, bound: tuple[int, ...]) -> bool:
    return {
        ">=": found >= bound,
        "<=": found <= bound,
        "==": found == bound,
        "!=": found != bound,
        "<": found < bound,
        ">": found > bound,
    }[relation]
