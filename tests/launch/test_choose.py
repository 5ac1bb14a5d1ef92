"""Which names a launch offers to fetch, and that the person is asked about what does not fit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ftengine.errors import FtError
from ftlaunch.launch.choose import model_name
from ftlaunch.launch.request import Talk
from tests.store.hubs import NAME, a_hub, models
from tests.store.models import model
from tests.support.hub_server import Hub

__all__ = ["a_hub"]


def talk(answers: Callable[[str], bool]) -> Talk:
    @contextlib.contextmanager
    def progress() -> Iterator[Callable[[str, float], None]]:
        yield lambda stage, done: None

    return Talk(lambda text: None, progress, answers)


def test_a_repository_is_fetched_after_asking(a_hub: Hub, ft_home: Path) -> None:
    a_hub.add(NAME, model(1000))
    with pytest.raises(FtError, match="is not in the store"):
        model_name(NAME, talk(lambda question: False))
    assert models(ft_home) == []
    assert model_name(NAME, talk(lambda question: True)) == NAME
    assert models(ft_home) == ["org--name"]


def test_a_short_name_in_any_case_and_a_second_question(a_hub: Hub, ft_home: Path) -> None:
    """What is not served yet is a question of its own, put to the same person."""
    a_hub.add("openai/gpt-oss-20b", model(1000))
    asked: list[str] = []

    def answers(question: str) -> bool:
        asked.append(question)
        return True

    assert model_name("GPT-OSS-20B", talk(answers)) == "GPT-OSS-20B"
    assert len(asked) == 2
    assert "not served" in asked[1]
    assert models(ft_home) == ["openai--gpt-oss-20b"]


def test_a_path_is_not_offered(ft_home: Path) -> None:
    with pytest.raises(FtError, match="there is no directory"):
        model_name("./nothing", talk(lambda question: pytest.fail("asked")))
