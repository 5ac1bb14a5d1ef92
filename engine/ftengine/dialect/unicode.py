"""Text that can be written as UTF-8."""

from __future__ import annotations


def well_formed(text: str) -> str:
    """Surrogate pairs joined, lone surrogates as U+FFFD: JSON can carry them, UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
