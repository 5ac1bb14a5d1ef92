"""How many prefill tokens a step may take, so that it stays short whatever the model's speed."""

from __future__ import annotations


class PrefillBudget:
    """Follows the measured time a step; `tokens` is the bound for the next one, a multiple of the page size.

    A step cannot be interrupted, so its length bounds how soon a cancellation frees its slot and how long decoding
    sequences wait for their next token.
    """

    def __init__(self, largest: int, page_size: int, seconds: float) -> None:
        """largest: tokens, whatever the speed; seconds: how long a step may take."""
        self._page_size = page_size
        self._largest = max(page_size, largest // page_size * page_size)
        self._seconds = seconds
        self.tokens = self._aligned(64)

    def measured(self, tokens: int, seconds: float) -> None:
        """A step computed `tokens` prefill tokens in `seconds`, its decodes included."""
        if tokens < self._page_size or (2 * tokens < self.tokens and seconds < self._seconds):
            return  # mostly what every step costs, so it says little about a full chunk
        fitting = int(tokens * self._seconds / max(seconds, 1e-6))
        # Attention grows along a prompt, so the next chunk costs more than this one: never more than double.
        self.tokens = self._aligned(min(fitting, 2 * tokens))

    def halve(self) -> None:
        """A step ran out of memory."""
        self._largest = max(self._page_size, self._aligned(self.tokens // 2))
        self.tokens = self._largest

    def _aligned(self, tokens: int) -> int:
        return min(self._largest, max(self._page_size, tokens // self._page_size * self._page_size))
