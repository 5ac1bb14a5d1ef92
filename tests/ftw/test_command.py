"""`ft checkpoint`, as it is typed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ftengine.weights.ftw.header import read_header
from ftengine.weights.ftw.verify import verify
from ftlaunch.cli.app import main


def test_converts_and_says_how_to_serve(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a b"
    assert main(["checkpoint", "--model", str(model), "--out", str(out), "--experts", "mxfp4", "--verify"]) == 0
    shown = capsys.readouterr()
    assert f"ft serve --model '{out}'" in shown.out
    assert "experts: relative error" in shown.out
    for stage in ("Writing", "Checking every byte", "Comparing with the source"):
        assert stage in shown.err
    assert verify(out) == []
    assert read_header(out).origin.name == str(model)


def test_only_its_owner_may_write_to_it(model: Path, tmp_path: Path) -> None:
    """Whatever the umask, and wherever it is."""
    out = tmp_path / "out"
    before = os.umask(0)
    try:
        assert main(["checkpoint", "--model", str(model), "--out", str(out)]) == 0
    finally:
        os.umask(before)
    assert [path for path in (out, *out.rglob("*")) if path.stat().st_mode & 0o022] == []


def test_json_is_one_object_a_line(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["checkpoint", "--model", str(model), "--out", str(out), "--shard-gib", "0.0001", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0]["event"] == "stage"
    done = lines[-1]
    assert done["event"] == "done"
    assert done["bytes"] == sum((out / name).stat().st_size for name in done["files"])
    assert len(done["files"]) > 2


def test_the_record_of_a_pulled_model_comes_along(model: Path, tmp_path: Path, ft_home: Path) -> None:
    import shutil

    from ftlaunch.store import manifest

    folder = ft_home / "models" / "mine"
    shutil.copytree(model, folder)
    manifest.write(folder, manifest.Source("hub", "org/name", "a" * 40, "main"), {})
    assert main(["checkpoint", "--model", "mine", "--out", str(tmp_path / "one")]) == 0
    origin = read_header(tmp_path / "one").origin
    assert (origin.name, origin.revision, origin.kind) == ("org/name", "a" * 40, "safetensors")
    assert main(["checkpoint", "--model", str(tmp_path / "one"), "--out", str(tmp_path / "two")]) == 0
    assert read_header(tmp_path / "two").origin == origin


ROWS = [
    (["--model", "nothing", "--out", "OUT"], 1, "no model is called nothing"),
    (["--model", "./nothing", "--out", "OUT"], 1, "there is no directory"),
    (["--model", "MODEL", "--out", "OUT/below/that"], 1, "mkdir -p"),
    (["--model", "MODEL", "--out", "MODEL"], 1, "is not an FTW directory"),
    (["--model", "MODEL", "--out", "OUT", "--shard-gib", "nan"], 2, "is not below"),
    (["--model", "MODEL", "--out", "OUT", "--shard-gib", "1e300"], 2, "is not below"),
    (["--model", "MODEL", "--out", "OUT", "--experts", "int4"], 2, "int4"),
    (["--model", "MODEL", "--out", "OUT", "--dense", "mxfp4"], 2, "mxfp4"),
    (["--model", "MODEL", "--out", "OUT", "--shard-gib", "0"], 2, "--shard-gib"),
    (["--model", "MODEL", "--out", "/"], 1, "cannot be replaced"),
    (["--model", "MODEL"], 2, "--out"),
]


@pytest.mark.parametrize(("arguments", "status", "words"), ROWS)
def test_rows(
    arguments: list[str],
    status: int,
    words: str,
    model: Path,
    tmp_path: Path,
    ft_home: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = {"MODEL": str(model), "OUT": str(tmp_path / "out")}
    typed = [
        places.get(word.partition("/")[0], word.partition("/")[0]) + "".join(word.partition("/")[1:])
        for word in arguments
    ]
    before = sorted(model.parent.iterdir())
    assert main(["checkpoint", *typed]) == status
    shown = capsys.readouterr().err
    assert words in shown
    assert "Traceback" not in shown
    assert status == 2 or "Try:" in shown
    assert sorted(model.parent.iterdir()) == before
    assert not (tmp_path / "out").exists()


def test_torch_is_not_loaded_for_what_is_wrong_with_the_model(tmp_path: Path, model: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    program = (
        "import sys; from ftlaunch.cli.app import main; "
        "status = main(['checkpoint', '--model', sys.argv[1], '--out', sys.argv[2]]); "
        "assert status == 1 and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(broken), str(tmp_path / "out")], check=True)


def test_the_model_is_not_its_own_destination(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What rounding loses cannot be brought back from the only copy."""
    out = tmp_path / "out"
    assert main(["checkpoint", "--model", str(model), "--out", str(out)]) == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert main(["checkpoint", "--model", str(out), "--out", str(out), "--experts", "fp8"]) == 1
    assert f"{out} is the model itself" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
