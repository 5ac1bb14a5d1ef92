"""Message parts as one plain string: the single form of content that every template takes."""

from __future__ import annotations

from collections.abc import Iterable

from ftengine.conversation import Image, Part, Text, ToolReference
from ftengine.dialect.tools import Toolbox


def render_parts(parts: Iterable[Part | ToolReference], toolbox: Toolbox) -> str:
    """Texts, placeholders for what a text model cannot see, and definitions of tools that become known here."""
    pieces = []
    for part in parts:
        if isinstance(part, Text):
            pieces.append(part.text)
        elif isinstance(part, Image):
            pieces.append(placeholder(part))
        elif isinstance(part, ToolReference):
            pieces.append(toolbox.introduce(part.name))
    return pieces[0] if len(pieces) == 1 else "\n".join(filter(None, pieces))


def placeholder(image: Image) -> str:
    return f"[{image.label or 'image'} left out: this model reads text only]"
