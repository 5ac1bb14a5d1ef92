"""Stop strings against a plain definition over the whole text; cuts must not matter."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ftengine.api.stops import StopScanner

LETTERS = st.text(alphabet="ab", max_size=12)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=4)


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Read letter by letter; the first moment at which the text read ends in a stop string, the longest of them."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(pieces=st.lists(LETTERS, max_size=6), stops=STOPS)
def test_equals_the_definition_however_it_is_cut(pieces: list[str], stops: list[str]) -> None:
    scanner = StopScanner(stops)
    out = "".join(scanner.feed(piece) for piece in pieces)
    matched = scanner.matched
    out += scanner.flush()
    assert (out, matched) == expected("".join(pieces), stops)


@given(pieces=st.lists(LETTERS, max_size=6), stops=STOPS)
def test_holds_back_only_what_may_become_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    scanner = StopScanner(stops)
    fed = out = ""
    for piece in pieces:
        fed += piece
        out += scanner.feed(piece)
        if scanner.matched is not None:
            return
        held = fed[len(out) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)
