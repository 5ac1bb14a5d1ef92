"""What the log says of converting: something where it would save time, nothing where there is nothing to save."""

from __future__ import annotations

import shlex
from pathlib import Path

from ftengine.weights.ftw.advice import advice
from ftengine.weights.open import open_source
from ftlaunch.cli.checkpoint import command


def test_only_where_it_saves(model: Path, converted: Path) -> None:
    with open_source(model) as source:
        said = advice(source, model, 18_000_000_000, 14.26)
        assert said is not None
        assert "18.0 GB of weights were read and packed in 14.3 s" in said
        assert advice(source, model, 1, 0.2) is None
    with open_source(converted) as source:
        assert advice(source, converted, 18_000_000_000, 14.0) is None


def test_the_command_can_be_typed(model: Path) -> None:
    """Also for odd folders: its words are those that the command takes."""
    with open_source(model) as source:
        said = advice(source, Path("/models/it's a model"), 1, 2.0)
    assert said is not None
    words = shlex.split(said[said.index("(") + 1 : said.rindex(")")])
    assert words[:2] == ["ft", "checkpoint"]
    context = command.make_context("checkpoint", words[2:])
    assert context.params["model"] == "/models/it's a model"
    assert context.params["out"] == Path("/models/it's a model-ftw")
