"""How many prefill tokens a step may take, so that it stays short whatever the model's speed."""

from __future__ import annotations

WORTHWHILE = 3.0  # times its fixed part that a step may last: two thirds of it then go to tokens
PATIENCE = 4.0  # times the asked-for seconds that no step may last, whatever its fixed part
UNLIKE = 1.5  # ratio of two chunks' sizes from which their times tell the fixed part from the rest


class PrefillBudget:
    """Follows the measured time of steps; `tokens` is the bound for the next one, a multiple of the page size.

    A step cannot be interrupted, so its length bounds how soon a cancellation frees its slot and how long decoding
    sequences wait for their next token. A step costs a fixed part and a part for each token. On busy cores the fixed
    part alone can come near the bound; smaller chunks would then only add more of it, so the bound gives way.
    """

    def __init__(self, largest: int, page_size: int, seconds: float, first: int = 64) -> None:
        """largest: tokens, whatever the speed; seconds: how long a step should take; first: tokens, until measured."""
        self._page_size = page_size
        self._largest = max(page_size, largest // page_size * page_size)
        self._seconds = seconds
        self._fixed = 0.0  # seconds
        self._last: tuple[int, float] | None = None  # tokens and seconds of the step before
        self.tokens = self._aligned(first)

    def measured(self, tokens: int, seconds: float) -> None:
        """A step computed `tokens` prefill tokens in `seconds`, its decodes included."""
        if tokens < self._page_size:
            return  # mostly what every step costs
        self._learn_fixed(tokens, seconds)
        allowed = min(max(self._seconds, WORTHWHILE * self._fixed), PATIENCE * self._seconds)
        if 2 * tokens < self.tokens and seconds < allowed:
            return  # a prompt's short end says little about a full chunk
        per_token = max(seconds - self._fixed, 1e-6) / tokens
        fitting = int(max(allowed - self._fixed, 0.0) / per_token)
        # Attention grows along a prompt, so the next chunk costs more than this one: never more than double.
        self.tokens = self._aligned(min(fitting, 2 * tokens))

    def halve(self) -> None:
        """A step ran out of memory."""
        self._largest = max(self._page_size, self._aligned(self.tokens // 2))
        self.tokens = self._largest

    def _learn_fixed(self, tokens: int, seconds: float) -> None:
        """From two neighbouring steps of unlike size: their positions are alike, so size makes the difference."""
        if self._last is not None:
            other, other_seconds = self._last
            if max(tokens, other) >= UNLIKE * min(tokens, other):
                slope = max((seconds - other_seconds) / (tokens - other), 0.0)
                found = max(seconds - slope * tokens, 0.0)
                self._fixed = (self._fixed + found) / 2 if self._fixed else found
        self._fixed = min(self._fixed, seconds)
        self._last = tokens, seconds

    def _aligned(self, tokens: int) -> int:
        return min(self._largest, max(self._page_size, tokens // self._page_size * self._page_size))
