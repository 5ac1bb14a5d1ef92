"""Models that would like to run code or reach other files: every command that looks at them leaves a canary absent."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tests.store import small_models

CODE = "import pathlib; pathlib.Path({canary!r}).write_text('ran')"
TEMPLATE = (
    "{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}"
    "{{{{ cycler.__init__.__globals__.os.system('touch {canary}') }}}}"
)


class Payload:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, (CODE.format(canary=str(self.canary)),)


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


@pytest.fixture
def hostile(ft_home: Path, canary: Path) -> Path:
    """auto_map with modules beside it, pickles of every ending, a template that breaks out, a setup hook."""
    auto_map = {"AutoConfig": "configuration_x.Config", "AutoModelForCausalLM": "modeling_x.Model"}
    folder = small_models.store(ft_home, "hostile", recorded=False, auto_map=auto_map, trust_remote_code=True)
    for name in (
        "configuration_x.py",
        "modeling_x.py",
        "tokenization_x.py",
        "__init__.py",
        "sitecustomize.py",
        "conftest.py",
    ):
        (folder / name).write_text(CODE.format(canary=str(canary)))
    for name in ("pytorch_model.bin", "model.pt", "x.pth", "x.ckpt", "x.pkl"):
        (folder / name).write_bytes(pickle.dumps(Payload(canary)))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["tokenization_x.T", None]}, "tokenizer_class": "T"})
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE.format(canary=canary))
    return folder


def test_the_payloads_work(canary: Path) -> None:
    """Else the others would show nothing."""
    pickle.loads(pickle.dumps(Payload(canary)))
    assert canary.exists()


def ft(ft_home: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """From within the model's folder, where Python would find the modules."""
    return subprocess.run(
        [sys.executable, "-c", "import sys; from ftlaunch.cli import main; sys.exit(main(sys.argv[1:]))", *arguments],
        cwd=cwd,
        env={**os.environ, "FT_HOME": str(ft_home), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("list",),
        ("show", "hostile"),
        ("show", "."),
        ("verify", "hostile"),
        ("serve", "--model", "hostile", "--port", "0"),
    ],
    ids=" ".join,
)
def test_no_command_runs_a_models_code(arguments: tuple[str, ...], hostile: Path, ft_home: Path, canary: Path) -> None:
    (hostile / "tokenizer.json").write_text("{}")  # a server refuses it, after it has opened everything before
    done = ft(ft_home, hostile, *arguments)
    assert not canary.exists()
    assert "Traceback" not in done.stderr
    assert done.returncode == (1 if arguments[0] == "serve" else 0), done.stdout + done.stderr


def test_weights_in_pickles_only_are_refused(hostile: Path, ft_home: Path, canary: Path) -> None:
    (hostile / "model.safetensors").unlink()
    for arguments in (("show", "hostile"), ("verify", "hostile")):
        done = ft(ft_home, hostile, *arguments)
        assert done.returncode == 1
        assert "pickle" in done.stdout + done.stderr
    assert not canary.exists()


def test_a_template_cannot_leave_its_sandbox(hostile: Path, canary: Path) -> None:
    """The dialect opens and renders it: refused or rendered without effect, but the canary is not touched."""
    from ftengine.conversation import Conversation, Message, Text
    from ftengine.dialect import open_dialect
    from ftengine.errors import FtError
    from ftengine.weights.checkpoint import Checkpoint

    scripted = Path(__file__).parents[1] / "support" / "scripted_checkpoint"
    (hostile / "tokenizer.json").write_bytes((scripted / "tokenizer.json").read_bytes())
    with pytest.raises(FtError):
        open_dialect(Checkpoint.open(hostile)).render(Conversation((Message("user", (Text("hi"),)),)))
    assert not canary.exists()
