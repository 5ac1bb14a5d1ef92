"""From a request's bytes to a checked struct: size, shape and UTF-8 first, then types, each fault a 400 that names
its field."""

from __future__ import annotations

import asyncio
import codecs
import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from ftengine.api.http import read_body
from ftengine.api.settings import Limits
from ftengine.errors import BadRequest, TooLarge

T = TypeVar("T")

PIECE = 1 << 20  # bytes
AT_ONCE = 1 << 20  # bytes; a longer body is decoded in a thread, for it may take seconds


async def read(request: Request, kind: type[T], limits: Limits) -> T:
    """The request's body. Raises BadRequest, TooLarge or ClientLeft."""
    raw = await read_body(request)
    if len(raw) <= AT_ONCE:
        return decode(raw, kind, limits)
    return await asyncio.to_thread(decode, raw, kind, limits)


def decode(raw: bytes | bytearray, kind: type[T], limits: Limits) -> T:
    """Unknown fields are passed over. Raises BadRequest or TooLarge."""
    values = sum(map(raw.count, (b",", b"{", b"[")))
    if values > limits.body_values:
        raise TooLarge(f"the body holds about {values} values; the limit is {limits.body_values}")
    _check_utf8(raw)
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise invalid(error) from None
    except msgspec.DecodeError as error:
        mended = without_lone_surrogates(raw)
        if mended is None:
            raise BadRequest(f"the body is not JSON: {error}") from None
        return decode(mended, kind, limits)
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None


def _check_utf8(raw: bytes | bytearray) -> None:
    """msgspec looks only at the strings that it keeps. In pieces, because a decoded copy may be four times as large."""
    if raw.isascii():
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(0, len(raw), PIECE):
            decoder.decode(raw[start : start + PIECE])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise BadRequest("the body is not UTF-8") from None


def loads(text: str) -> Any:
    """JSON text that a model or a client wrote; None when it is none."""
    raw = text.encode("utf-8", "replace")
    for candidate in (raw, without_lone_surrogates(raw)):
        try:
            return msgspec.json.decode(candidate) if candidate is not None else None
        except (msgspec.DecodeError, RecursionError):
            continue
    return None


def check_depth(value: Any, where: str, limits: Limits) -> None:
    """Raises BadRequest for JSON nested deeper than the limit: later steps walk it recursively."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(limits.json_depth):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return
    raise BadRequest(f"{where}: nested more than {limits.json_depth} deep", param=where)


def invalid(error: msgspec.ValidationError) -> BadRequest:
    """msgspec says "Expected `int`, got `str` - at `$.a.b`"; said here with the field first."""
    found = _PLACE.fullmatch(str(error))
    text, path = (found[1], found[2]) if found else (str(error), "")
    field = path.lstrip(".")
    missing = re.fullmatch(r"Object missing required field `(.*)`", text)
    if missing:
        field = f"{field}.{missing[1]}".lstrip(".")
        text = "required"
    return BadRequest(f"{field}: {text}" if field else text, param=field or None)


_PLACE = re.compile(r"(.*) - at `(?:key` in `)?\$(.*)`", re.DOTALL)
_ESCAPES = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)


def without_lone_surrogates(raw: bytes | bytearray) -> bytes | None:
    """The body with each unpaired \\uD800..\\uDFFF escape made U+FFFD; None when there is none.

    JavaScript writes such escapes when a client cut a string in the middle of a character.
    """
    mended = _ESCAPES.sub(lambda found: rb"\ufffd" if found[1] else found[0], raw)
    return bytes(mended) if mended != raw else None
