"""Variables for comparisons: what the engine would do with them on a GPU, and no wrong one passes anywhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ftengine import switches
from ftengine.errors import ConfigError
from ftengine.experts.online import asked_for
from tests.support.serving import SCRIPTED_CHECKPOINT, scripted_environment

DOCS = Path(__file__).parents[2] / "docs" / "environment.md"
WRONG = {"FT_SPLIT": ["", "1.5", "nan", "half"], "FT_PREFETCH": ["", "9", "-1", "08", "many"]}
WRONG_WORDS = {"FT_CACHE_POLICY": ["", "0", "LRU", "belady"]}


def test_a_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FT_SPLIT", raising=False)
    assert asked_for() is True
    for text, split in {"online": True, "fixed": False, "0": 0.0, "0.25": 0.25, "1": 1.0}.items():
        monkeypatch.setenv("FT_SPLIT", text)
        assert asked_for() is split or (asked_for() == split and type(asked_for()) is float)


def test_as_many_are_prefetched_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="there is no Triton for this system")
    from ftengine.kernels.triton.cache_state import PREFETCH_MAX

    assert PREFETCH_MAX.value == switches.MOST_PREFETCH
    assert [switches.prefetch(str(number)) for number in range(9)] == list(range(9))


def test_each_policy_is_one_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="there is no Triton for this system")
    from ftengine.kernels.triton.cache_state import POLICIES
    from ftengine.models.gpu.setup import GpuSetup, policy_asked_for

    assert tuple(POLICIES) == switches.POLICIES
    monkeypatch.delenv("FT_CACHE_POLICY", raising=False)
    assert policy_asked_for() == GpuSetup("hybrid", 1, 16, 4).policy == "aged"
    monkeypatch.setenv("FT_CACHE_POLICY", "lru")
    assert policy_asked_for() == "lru"


def test_all_are_looked_at() -> None:
    """All that docs/environment.md gives a number, but for FT_DEBUG, which anything but 1 leaves off."""
    for name in (*WRONG, *switches.OFF):
        for text in WRONG.get(name, ["no", "2", "true"]):
            with pytest.raises(ConfigError, match=rf"^{name} is {re.escape(repr(text))}: ") as caught:
                switches.check({name: text})
            assert caught.value.next_step == f"unset {name}"
        switches.check({name: "0"})
        switches.check({name: "1"})
    for name, texts in WRONG_WORDS.items():
        for text in texts:
            with pytest.raises(ConfigError, match=rf"^{name} is {re.escape(repr(text))}: aged or lru$") as caught:
                switches.check({name: text})
            assert caught.value.next_step == f"unset {name}"
    switches.check({"FT_CACHE_POLICY": "lru"})
    switches.check({})
    written = set(re.findall(r"^\| `(FT_\w+)` \| .*(?:`0`| 0 )", DOCS.read_text(encoding="utf-8"), re.MULTILINE))
    assert written == {*WRONG, *switches.OFF}


@pytest.mark.parametrize(
    ("variable", "flags", "said"),
    [
        (("FT_PREFETCH", "9"), (), "FT_PREFETCH is '9': from 0 to 8 experts a layer\nTry:   unset FT_PREFETCH\n"),
        (("FT_PIN", "no"), (), "FT_PIN is 'no': 0 is off, and 1 as without it\nTry:   unset FT_PIN\n"),
        (
            ("FT_PREFETCH", "8"),
            ("--moe-backend", "offload"),
            "--moe-backend offload needs a GPU, and no GPU is used here: --device cpu was given\n"
            f"Try:   ft serve --model {SCRIPTED_CHECKPOINT} --device cpu\n",
        ),
    ],
)
def test_a_server_does_not_even_listen(
    variable: tuple[str, str], flags: tuple[str, ...], said: str, ft_home: Path
) -> None:
    name, text = variable
    command = [sys.executable, "-m", "ftlaunch", "serve", str(SCRIPTED_CHECKPOINT), "--port", "0", "--device", "cpu"]
    environment = {**scripted_environment(ft_home), name: text}
    done = subprocess.run([*command, *flags], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, f"Error: {said}")
