"""Opens the tiers of the prompt cache that lie below the device, when warming up is over."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

from ftengine.cache.sequences import SequenceCache
from ftengine.cache.tiers.identity import Identity, identify
from ftengine.cache.tiers.open import open_tiers
from ftengine.config import Resolved
from ftengine.core import CacheLayout
from ftengine.experts.pinned import pin
from ftengine.memory.prompts import Below
from ftengine.scheduler.beginning import Beginning

log = logging.getLogger(__name__)


def open_below(begin: Beginning, cache: SequenceCache, layout: CacheLayout, planned: Below, device: str) -> Below:
    """Gives `cache` its lower tiers. Returns what came of the plan: what cannot be used costs a warning, no more."""
    if not planned.memory:
        return planned
    folder = begin.config.cache_dir
    try:
        identity = _identity(begin, layout, device)
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}"
        log.warning("prompts are kept on the device only: the model cannot be read for their key: %s", reason)
        return _without(planned, {"host", "disk"})
    cache.tiers = open_tiers(
        tensors=cache.tensors,
        layout=layout,
        sessions=cache.sessions,
        host_bytes=planned.host.value,
        disk_bytes=planned.disk.value,
        folder=None if folder is None else Path(folder),
        identity=identity,
        wake=begin.wake,
        pin=pin if device == "cuda" else None,
    )
    there = set() if cache.tiers is None else {sizes.name for sizes in cache.tiers.sizes()}
    return _without(planned, {"host", "disk"} - there)


def _identity(begin: Beginning, layout: CacheLayout, device: str) -> Identity:
    config, checkpoint = begin.config, begin.checkpoint
    tokenizer = checkpoint.tokenizer()
    return identify(
        checkpoint.path,
        name=config.model_name or checkpoint.path.name,
        dtype=begin.dtype.value,
        device=device,
        layout=layout,
        page_size=config.page_size,
        template=checkpoint.chat_template,
        tokenizer=b"" if isinstance(tokenizer, Path) and not tokenizer.exists() else tokenizer,
    )


def _without(planned: Below, tiers: set[str]) -> Below:
    """tiers: of "host" and "disk", those that there are not."""
    missing = Resolved(0, "it could not be opened; the log says why")
    host = missing if "host" in tiers and planned.host.value else planned.host
    disk = missing if "disk" in tiers and planned.disk.value else planned.disk
    return dataclasses.replace(planned, host=host, disk=disk)
