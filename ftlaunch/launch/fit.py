"""Whether an agent's first prompt fits into the model's window, and what to do when it does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ftengine.errors import FtError
from ftproviders import LaunchOptions, Provider
from ftproviders.base import ANSWER_ROOM


def fitting(
    provider: Provider, model: str, context: int, options: LaunchOptions, say: Callable[[str], None] = lambda text: None
) -> LaunchOptions:
    """The options, with the agent's lean form chosen where only that fits. Raises FtError when nothing fits."""
    needed = provider.prompt_tokens(options)
    if needed + ANSWER_ROOM <= context:
        return options
    lean = replace(options, lean=True)
    if provider.lean_prompt is not None and not options.lean and provider.prompt_tokens(lean) + ANSWER_ROOM <= context:
        say(
            f"{provider.title} begins with about {needed:,} tokens and {model} holds {context:,}: "
            f"starting its lean form, which begins with about {provider.prompt_tokens(lean):,}"
        )
        return lean
    raise FtError(
        f"{provider.title} begins with about {needed:,} tokens and {model} holds {context:,}",
        "choose a model with a larger window: ft list",
    )
