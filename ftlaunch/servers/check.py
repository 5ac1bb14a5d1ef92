"""What the engine would refuse of its settings for reasons that a model's headers tell: before anybody waits for it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ftengine.errors import ConfigError

if TYPE_CHECKING:
    from ftengine.config import EngineConfig

log = logging.getLogger(__name__)

LOOKED_AT = ("context", "kv_tokens", "max_running_requests", "cache_device", "cache_host", "cache_disk")


def check_headers(config: EngineConfig) -> None:
    """Raises ConfigError, in the engine's words, and only for what it would refuse whatever memory is free then.

    Without one of those settings nothing is read. Files that are no model are left to the engine.
    """
    if all(getattr(config, name) is None for name in LOOKED_AT):
        return
    try:
        _check(config)
    except ConfigError:
        raise
    except Exception as error:
        log.debug("the settings are left to the engine", exc_info=error)


def _check(config: EngineConfig) -> None:
    import psutil

    from ftengine.memory import estimate
    from ftengine.memory.gpu import may_be_there
    from ftengine.memory.machine import available_memory
    from ftengine.memory.plan import check_context, check_memory, plan_cache, resolve_dtype
    from ftengine.models.base import ARCHITECTURES
    from ftengine.weights.checkpoint import Checkpoint
    from ftengine.weights.facts import weight_facts

    checkpoint = Checkpoint.open(config.model_dir)
    check_context(config, checkpoint.max_context)
    if checkpoint.architecture not in ARCHITECTURES:  # a plugin's, which keeps what it likes
        return
    if config.device != "cpu" and (config.device != "auto" or may_be_there()):
        return  # what a GPU has room for, its driver tells the engine
    text = checkpoint.text_config
    sizes = estimate.weight_sizes(weight_facts(checkpoint), text)
    weights = sizes.dense + sizes.banks
    token = estimate.kv_bytes_per_token(text, resolve_dtype(config.dtype).value)

    def fits(memory: int, source: str) -> None:
        check_memory(config, weights, token, memory, source)
        plan_cache(config, checkpoint.max_context, token, estimate.state_bytes(text), memory - weights)

    try:
        fits(int(psutil.virtual_memory().total), "all memory of this machine")
    except ConfigError:
        fits(*available_memory())  # what it advises fits now
        raise
