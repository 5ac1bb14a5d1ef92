"""Whether what a bench will send fits into the server's context: said before anything is sent."""

from __future__ import annotations

from collections.abc import Callable

from ftengine.errors import FtError
from ftlaunch.bench.client import Target, get

MARGIN = 1.2  # a text's tokens are known to some percent only


def check_room(target: Target, what: str, tokens: int, prompts: str, mend: Callable[[int], str]) -> None:
    """tokens: the most that the server will have of one prompt and its answer. prompts: of prompts.KINDS.

    mend: given how many tokens too many these are, what to type instead. Raises FtError.
    """
    context = get(target, "/health").get("context_length")
    if not isinstance(context, int):
        return
    most = int(context / (MARGIN if prompts == "code" else 1.0))
    if tokens > most:
        raise FtError(
            f"{what} of {tokens} tokens may not fit into the server's context of {context}",
            f"{mend(tokens - most)}, or a server with a longer --context",
        )
