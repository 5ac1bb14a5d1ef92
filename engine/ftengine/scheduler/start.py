"""From an EngineConfig to a running Engine: plugins, memory check, weights, cache, warm-up."""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Callable

import torch

from ftengine.cache.sequences import SequenceCache
from ftengine.cache.tensors import allocate_cache, kv_bytes_per_token, state_bytes
from ftengine.config import EngineConfig, Resolved, facts
from ftengine.errors import ConfigError
from ftengine.kernels.choice import choose_kernels
from ftengine.memory import estimate
from ftengine.memory.machine import available_memory
from ftengine.memory.plan import CachePlan, check_context, check_memory, plan_cache, resolve_dtype, resolve_threads
from ftengine.models.base import Model, ModelOptions, load
from ftengine.scheduler.chunk import PrefillBudget
from ftengine.scheduler.engine import Engine
from ftengine.scheduler.jobs import Limits
from ftengine.weights.checkpoint import Checkpoint
from ftengine.weights.ftw.advice import advice
from ftengine.weights.open import open_source
from ftengine.wire import Ready

log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]  # stage, fraction 0..1 of the whole start

LOADED = 0.9  # the fraction at which the weights are in


def start(config: EngineConfig, progress: Progress) -> tuple[Engine, Ready]:
    """Raises FtError or MemoryError, with what is wrong and how much is missing."""
    threads = resolve_threads(config.threads)
    torch.set_num_threads(threads.value)
    kernels = choose_kernels()
    import_plugins(os.environ.get("FT_PLUGINS", ""))
    checkpoint = Checkpoint.open(config.model_dir)
    check_context(config, checkpoint.max_context)
    memory, bound = available_memory()
    dtype = resolve_dtype(config.dtype)
    token_bytes = estimate.kv_bytes_per_token(checkpoint.text_config, dtype.value)
    weights = open_source(checkpoint)
    weight_bytes = estimate.weight_bytes(weights, checkpoint.text_config)
    check_memory(config, weight_bytes, token_bytes, memory, bound)

    def loading(stage: str, done: float) -> None:
        progress(stage, LOADED * done)

    options = ModelOptions(dtype=dtype.value, threads=threads.value, progress=loading, source=weights)
    began = time.monotonic()
    model = load(checkpoint, options)
    if saving := advice(weights, checkpoint.path, weight_bytes, time.monotonic() - began):
        log.info(saving)
    leave_cores_to(model)
    progress("allocating the cache", LOADED)
    engine, plan = build_engine(config, model)
    progress("warming up", 0.95)
    engine.warm_up()
    known = facts(
        threads=threads,
        kernels=kernels,
        dtype=dtype,
        context_length=plan.context,
        max_running=plan.max_running,
        kv_tokens=plan.kv_tokens,
        state_slots=plan.state_slots,
        memory_bytes=Resolved(memory, bound),
    )
    for name, fact in known.items():
        log.info("%s: %s (%s)", name, fact["value"], fact["reason"])
    return engine, Ready(
        architecture=checkpoint.architecture,
        context_length=plan.context.value,
        max_running=plan.max_running.value,
        dtype=dtype.value,
        device="cpu",
        kv_tokens=plan.kv_tokens.value,
        facts=known,
    )


def leave_cores_to(model: Model) -> None:
    """Torch's threads spin for milliseconds after an operation, on the cores where native ones should go on."""
    if getattr(model, "native", None) is not None:
        torch.set_num_threads(1)


def build_engine(config: EngineConfig, model: Model) -> tuple[Engine, CachePlan]:
    """Divides the memory that is left among the model's caches. Raises ConfigError."""
    layout, page_size = model.cache_layout, config.page_size
    memory, _ = available_memory()
    plan = plan_cache(config, model.max_context, kv_bytes_per_token(layout), state_bytes(layout), memory)
    pages, slots = plan.kv_tokens.value // page_size, plan.state_slots.value
    cache = SequenceCache(allocate_cache(layout, pages, page_size, slots), pages, slots)
    limits = Limits(plan.context.value, plan.max_running.value, model.vocab_size, model.eos_token_ids)
    budget = PrefillBudget(config.prefill_chunk, page_size, config.step_seconds)
    return Engine(model, cache, limits, budget), plan


def import_plugins(names: str) -> None:
    """Imports the comma-separated modules; they may register architectures. Raises ConfigError."""
    for name in filter(None, (part.strip() for part in names.split(","))):
        try:
            importlib.import_module(name)
        except Exception as error:
            raise ConfigError(
                f"the module {name}, named in FT_PLUGINS, cannot be imported: {type(error).__name__}: {error}",
                "unset FT_PLUGINS",
            ) from error
