"""The store's health, from sizes and headers alone: `ft verify` reads every byte."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote

from ftlaunch.machine.probe import Asked
from ftlaunch.machine.verdict import Finding, plural
from ftlaunch.store.listing import Installed, Partial, cached, installed, partial

BROKEN = ("damaged: ", "unreadable: ")


def probe(asked: Asked) -> Iterator[Finding]:
    yield models(installed())
    yield incomplete(partial())
    yield hub_cache(cached())


def models(found: list[Installed]) -> Finding:
    size = sum(model.bytes for model in found)
    broken = [model for model in found if model.architecture.startswith(BROKEN)]
    data = {"models": len(found), "bytes": size, "broken": [model.name for model in broken]}
    if not found:
        return Finding("store.models", "models", "none", "note", "", "ft pull demo", data)
    value = f"{plural(len(found), 'model')}, {size / 1e9:.1f} GB"
    if not broken:
        return Finding("store.models", "models", value, data=data)
    first = broken[0]
    value += f"; {first.name} is {first.architecture}"
    value += f"; {len(broken) - 1} more" if len(broken) > 1 else ""
    mend = f"ft verify {quote(first.name)}"
    return Finding("store.models", "models", value, "bad", "it cannot be served", mend, data)


def incomplete(found: list[Partial]) -> Finding:
    """What interrupted pulls left."""
    size = sum(item.bytes for item in found)
    data = {"models": [item.name for item in found], "bytes": size}
    if not found:
        return Finding("store.incomplete", "incomplete", "none", data=data)
    first = found[0]
    step = "ft pull" if first.can_go_on else "ft rm"
    value = f"{', '.join(item.name for item in found)}: {size / 1e9:.1f} GB"
    return Finding(
        "store.incomplete", "incomplete", value, "note", "space on the disk", f"{step} {quote(first.name)}", data
    )


def hub_cache(found: list[Installed]) -> Finding:
    """Models that other programs fetched, which can be served where they are."""
    size = sum(model.bytes for model in found)
    value = f"{plural(len(found), 'model')}, {size / 1e9:.1f} GB" if found else "no complete model"
    return Finding("store.hub_cache", "Hub's cache", value, data={"models": len(found), "bytes": size})
