"""What is installed, against importlib.metadata and torch itself; and agents, port and store."""

from __future__ import annotations

import json
import os
import socket
from importlib import metadata
from pathlib import Path

import pytest

from ftlaunch.machine import agents, server, software, store
from ftproviders import binaries
from ftproviders.registry import PROVIDERS
from tests.support.ports import free_port


def test_torch_is_told_without_being_imported() -> None:
    import torch

    found = software.torch()
    assert found.data["torch"] == metadata.version("torch")
    assert found.data["cuda"] == torch.version.cuda


def test_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "version", lambda package: None)
    found = software.torch()
    assert found.verdict == "bad"
    assert found.mend == "pip install --force-reinstall ftlaunch"


REQUIREMENTS = [
    # installed, required, wrong
    ("2.12.0+cpu", "torch<2.14,>=2.11", ""),
    ("2.10.1", "torch<2.14,>=2.11", "torch 2.10.1, >=2.11 is needed"),
    ("2.14.0", "torch<2.14,>=2.11", "torch 2.14.0, <2.14 is needed"),
    ("2.11", "torch>=2.11.0", ""),
    (None, "torch>=2.11", "torch is missing"),
    (None, 'triton>=3.6; platform_system == "Amiga"', ""),
]


@pytest.mark.parametrize(("installed", "required", "wrong"), REQUIREMENTS)
def test_requirements(monkeypatch: pytest.MonkeyPatch, installed: str | None, required: str, wrong: str) -> None:
    monkeypatch.setattr(software.metadata, "requires", lambda name: [required, 'pytest>=99; extra == "test"'])
    monkeypatch.setattr(software, "version", lambda package: installed)
    found = software.needs()
    assert found.data["wrong"] == ([wrong] if wrong else [])
    assert found.verdict == ("bad" if wrong else "ok")


def test_this_installation_has_what_it_needs() -> None:
    assert software.needs().verdict == "ok"


def test_agents_in_ft_s_own_folder(ft_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package laid as npm lays it, once in the tested version and once in a much newer one."""
    monkeypatch.setenv("PATH", str(tmp_path))
    claude = PROVIDERS["claude"]
    package = binaries.prefix(ft_home / "agents" / "claude") / "node_modules" / claude.npm.package
    package.mkdir(parents=True)
    program = package / "cli"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    links = package.parents[1] / ".bin"
    links.mkdir()
    (links / claude.executable).symlink_to(program)
    for version, verdict in ((claude.npm.tested, "ok"), ("99.1.0", "note")):
        (package / "package.json").write_text(json.dumps({"name": claude.npm.package, "version": version}))
        found = agents.agent(claude, binaries.locate(claude, ft_home / "agents" / "claude", os.environ))
        assert found.data["version"] == version
        assert found.verdict == verdict
    missing = agents.agent(PROVIDERS["codex"], binaries.locate(PROVIDERS["codex"], tmp_path / "none", os.environ))
    assert missing.value.startswith("not installed")


def test_without_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What npm would fetch is not offered then."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert agents.node().verdict == "note"
    codex = PROVIDERS["codex"]
    assert agents.agent(codex, binaries.locate(codex, tmp_path / "none", os.environ)).value.endswith("not installed")


@pytest.mark.parametrize(("version", "verdict"), [("v20.20.2", "note"), ("v22.0.0", "ok"), ("v101.1.0", "ok")])
def test_which_node(version: str, verdict: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """README says 22, as Claude Code's package does."""
    for name in ("node", "npm"):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\necho {version}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = agents.node()
    assert (found.verdict, found.data["node"]) == (verdict, version.removeprefix("v"))


def test_a_node_that_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(agents, "SECONDS", 0.2)
    program = tmp_path / "node"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert agents.node().data["node"] is None


def test_the_port(ft_home: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", free_port()))  # none that a system gives to others as soon as it is free
        other.listen()
        number = other.getsockname()[1]
        held = server.port(number, set())
        assert held.verdict == "note"
        assert f"pid {os.getpid()}" in held.value
        assert server.port(number, {number}).verdict == "ok"
    assert server.port(number, set()).data["free"]


def test_a_machine_that_cannot_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "DEFAULT_HOST", "192.0.2.1")  # an address for documentation, nobody's
    found = server.port(1, set())
    assert found.verdict == "bad"
    assert "192.0.2.1:1" in found.value


def test_a_store_with_a_damaged_model(ft_home: Path) -> None:
    from ftlaunch.store import manifest
    from ftlaunch.store.listing import installed, partial

    assert store.models(installed()).verdict == "note"
    model = ft_home / "models" / "cut"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "w.safetensors").write_bytes(bytes(10))
    manifest.write(model, manifest.Source("directory", "/x"), {"w.safetensors": manifest.File(11)})
    (ft_home / "models" / ".fetch-org--name").mkdir()
    found = store.models(installed())
    assert found.verdict == "bad"
    assert found.data["broken"] == ["cut"]
    assert found.mend == "ft verify cut"
    assert store.incomplete(partial()).mend == "ft pull org/name"
