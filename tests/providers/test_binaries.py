"""Finding programs in a made-up file system, with real files and a real (tiny) node."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ftproviders import PROVIDERS, binaries
from ftproviders.base import Npm


def program(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def node(path: Path, version: str) -> Path:
    return program(path, f"#!/bin/sh\necho {version}\n")


@pytest.mark.parametrize("agent", ["claude", "codex", "opencode"])
def test_path_comes_before_our_folder(agent: str, tmp_path: Path) -> None:
    provider = PROVIDERS[agent]
    environ = {"PATH": str(tmp_path / "bin")}
    assert binaries.locate(provider, tmp_path, environ).missing == (provider.npm.spec,)
    ours = program(tmp_path / "npm" / "node_modules" / ".bin" / provider.executable)
    assert binaries.locate(provider, tmp_path, environ).command == (str(ours),)
    users = program(tmp_path / "bin" / provider.executable)
    found = binaries.locate(provider, tmp_path, environ)
    assert (found.command, found.missing) == ((str(users),), ())


@pytest.mark.parametrize(
    ("on_path", "missing"),
    [
        ("v24.21.0", ()),
        ("v20.20.2", ("node@24",)),
        ("v25.1.0", ("node@24",)),
        ("nonsense", ("node@24",)),
        (None, ("node@24",)),
    ],
)
def test_openclaw_needs_a_node_of_its_range(on_path: str | None, missing: tuple[str, ...], tmp_path: Path) -> None:
    script = program(tmp_path / "lib" / "openclaw.mjs")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "openclaw").symlink_to(script)
    if on_path:
        node(tmp_path / "bin" / "node", on_path)
    environ = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin" if on_path else str(tmp_path / "bin")}
    found = binaries.locate(PROVIDERS["openclaw"], tmp_path, environ)
    assert found.missing == missing
    assert found.command[-1] == str(tmp_path / "bin" / "openclaw")
    ours = node(tmp_path / "npm" / "node_modules" / ".bin" / "node", "v24.21.0")
    environ = {"PATH": f"{tmp_path / 'bin'}:/bin:/usr/bin"}
    again = binaries.locate(PROVIDERS["openclaw"], tmp_path, environ)
    assert again.missing == ()
    assert again.command[0] == str(ours if missing else tmp_path / "bin" / "node")


def test_version_is_the_packages(tmp_path: Path) -> None:
    package = tmp_path / "lib" / "node_modules" / "@anthropic-ai" / "claude-code"
    real = program(package / "bin" / "claude.exe")
    (package / "package.json").write_text(json.dumps({"name": "@anthropic-ai/claude-code", "version": "2.0.1"}))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "claude").symlink_to(real)
    found = binaries.locate(PROVIDERS["claude"], tmp_path, {"PATH": str(tmp_path / "bin")})
    assert found.version == "2.0.1"
    assert not PROVIDERS["claude"].npm.supports(found.version)


@pytest.mark.parametrize(
    ("version", "known"), [("2.1.332", True), ("2.1.0-beta.3", True), ("2.10.0", False), ("3.1.0", False), ("x", False)]
)
def test_supported_versions(version: str, known: bool) -> None:
    assert Npm("p", "2.1.332", (2, 1)).supports(version) is known
