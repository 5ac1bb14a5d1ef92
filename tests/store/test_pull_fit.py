"""What `ft pull` tells before it fetches: from headers, as `ft show --fit` then says it of the model, and kept."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ftengine.kernels import native
from ftlaunch.cli import main
from ftlaunch.store.events import Event, Planned, Said
from ftlaunch.store.hub.skeleton import FIRST
from ftlaunch.store.wishes import Wishes
from tests.store.hubs import NAME, a_hub, get
from tests.store.models import model
from tests.support.hub_server import Hub
from tests.weights import checkpoints
from tests.weights.conventions import CONVENTIONS

__all__ = ["a_hub"]  # a fixture


@pytest.fixture
def served_hub(a_hub: Hub, tmp_path: Path) -> Hub:
    folder = tmp_path / "model"
    checkpoints.write(folder, CONVENTIONS["modelopt-nvfp4"])
    a_hub.add(NAME, {path.name: path.read_bytes() for path in folder.iterdir()})
    return a_hub


@pytest.mark.skipif(not native.AVAILABLE, reason="memory's bandwidth is measured with the native library")
def test_told_before_and_kept(served_hub: Hub, ft_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", NAME]) == 0
    said = capsys.readouterr().err
    assert re.search(r"^Memory: needs about \S+ .*available", said, re.MULTILINE)
    assert re.search(r"^Disk: ", said, re.MULTILINE)
    assert "It would be served on the CPU; context " in said
    low, high = map(float, re.findall(r"Predicted: (\S+) to (\S+) tokens/s", said)[0])
    assert 0 < low < high <= 2.01 * low
    (kept,) = json.loads((ft_home / "cache" / "speed.json").read_text())["models"]
    assert Path(kept["model"]).is_dir()
    assert kept["served"] == []
    (first,) = kept["predicted"]
    assert first["tokens_per_second"][0] == pytest.approx(low, rel=0.01)
    assert main(["show", NAME, "--fit", "--json"]) == 0
    found = {each["id"]: each["data"] for each in json.loads(capsys.readouterr().out)["findings"]}
    assert found["model.speed"]["predicted"] == first
    assert main(["pull", NAME]) == 0
    assert "Predicted" not in capsys.readouterr().err, "it is here, nothing is fetched"


def test_headers_alone_are_shown(served_hub: Hub) -> None:
    """Before the first file arrives; the weights are holes of their size, and the tokenizer is not asked for."""
    seen: list[Event] = []
    looks: list[tuple[set[str], int, int]] = []

    def look(path: Path, size: int) -> list[str]:
        weights = [file for file in path.iterdir() if file.suffix == ".safetensors"]
        held = sum(len(file.read_bytes().rstrip(b"\0")) for file in weights)
        looks.append(({file.name for file in path.iterdir()}, size, held))
        return ["looked at"]

    get(NAME, Wishes(look=look), seen=seen)
    ((names, size, held),) = looks
    total = next(event.bytes for event in seen if isinstance(event, Planned))
    assert size == total
    assert held <= FIRST < total
    assert not any(name.startswith("tokenizer") for name in names)
    assert seen.index(Said("looked at")) < next(n for n, event in enumerate(seen) if type(event).__name__ == "Moved")


def test_what_cannot_be_served_is_said(a_hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    a_hub.add(NAME, model(1000))
    assert main(["pull", NAME]) == 0
    assert "it cannot be served. Try: " in capsys.readouterr().err
