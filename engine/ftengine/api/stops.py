"""Stop strings in a stream: text is given out as soon as it cannot be the beginning of one any more."""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """One stretch of visible text at a time. The result does not depend on how the text is cut."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Returns the text that is certain. After a match (`matched`) nothing more comes out."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        # The first to be complete wins, of several that end together the longest: so cuts cannot matter.
        found = min(
            ((at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0), default=None
        )
        if found is not None:
            _, at, self.matched = found
            certain = self._held[:at]
            self._held = ""
            return certain
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        certain = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return certain

    def flush(self) -> str:
        """The stretch is over: what was held back is no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, shorter than `stop` itself."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
