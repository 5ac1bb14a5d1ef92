"""What servers are asked: program text of a wanted length, or tokens drawn at random.

Random tokens choose experts as no text does, so text is the default: parts of Python's own library, which every machine
has. The same seed gives the same text; an opening that is never the same keeps any cache from knowing it.
"""

from __future__ import annotations

import functools
import random
import secrets
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from ftengine.errors import FtError
from ftlaunch.bench.client import Target, stream

Prompt = str | list[int]  # as Completions take it

KINDS = ("code", "tokens")
TOKENS = range(1000, 8000)  # of every vocabulary, and none of them a control token
SAMPLE = 4000  # characters whose tokens are counted
PART = (400, 1600)  # characters that lie together in the source
LIBRARY = 2 << 20  # bytes of it that are read


@dataclass(frozen=True)
class Prompts:
    kind: str  # of KINDS
    characters: float  # a token

    @classmethod
    def of(cls, target: Target, kind: str) -> Prompts:
        """Asks the server for the length of a text in tokens. Raises FtError."""
        if kind == "tokens":
            return cls(kind, 1.0)
        text = opening() + code("sample", SAMPLE)
        reply = stream(target, "/v1/completions", {"prompt": text, "max_tokens": 1, "temperature": 0})
        return cls(kind, len(text) / max(1, reply.prompt_tokens))

    def unique(self, tokens: int, seed: str) -> Prompt:
        """About `tokens` long (exactly, of kind "tokens"); its beginning was never sent before."""
        if self.kind == "tokens":
            return [secrets.choice(TOKENS) for _ in range(min(4, tokens))] + _draw(seed, tokens - 4)
        head = opening()
        return head + self.text(max(1, tokens - round(len(head) / self.characters)), seed)

    def extended(self, prefix: Prompt, tokens: int, seed: str) -> Prompt:
        """`prefix`, and about `tokens` new ones that never followed it."""
        if isinstance(prefix, list):
            return prefix + [secrets.choice(TOKENS) for _ in range(min(2, tokens))] + _draw(seed, tokens - 2)
        mark = f"\n# {secrets.token_hex(2)}\n"
        return prefix + mark + self.text(max(1, tokens - round(len(mark) / 2)), seed)

    def text(self, tokens: int, seed: str) -> str:
        return code(seed, max(1, round(tokens * self.characters)))


def opening() -> str:
    return f"# {secrets.token_hex(6)}\n"


def code(seed: str, characters: int) -> str:
    """Parts of Python's library, one after the other, as `seed` draws them."""
    source, draw = _library(), random.Random(seed)
    parts: list[str] = []
    left = characters
    while left > 0:
        start = source.find("\n", draw.randrange(len(source) - PART[1])) + 1
        part = source[start : start + min(left, draw.randint(*PART))]
        parts.append(part)
        left -= len(part)
    return "".join(parts)


@functools.cache
def _library() -> str:
    texts, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        texts.append(text)
        size += len(text)
        if size > LIBRARY:
            break
    if size < 50 * PART[1]:
        raise FtError("the sources of Python's library, which prompts are made of, are not here", "--prompts tokens")
    return "".join(texts)


def _draw(seed: str, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.choice(TOKENS) for _ in range(max(0, count))]
