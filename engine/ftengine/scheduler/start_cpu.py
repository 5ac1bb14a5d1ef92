"""The start on the CPU: memory check, weights, cache, warm-up."""

from __future__ import annotations

import logging

import torch

from ftengine.cache.sequences import SequenceCache
from ftengine.cache.tensors import allocate_cache, kv_bytes_per_token, state_bytes
from ftengine.config import EngineConfig, Resolved
from ftengine.memory import estimate
from ftengine.memory.machine import available_memory
from ftengine.memory.plan import CachePlan, check_memory, plan_cache, resolve_prefill
from ftengine.models.base import Model, ModelOptions, load
from ftengine.scheduler.beginning import Beginning, Started
from ftengine.scheduler.chunk import PrefillBudget
from ftengine.scheduler.engine import Engine
from ftengine.scheduler.jobs import Limits
from ftengine.scheduler.prompt_cache import open_below
from ftengine.weights.ftw.advice import advice

log = logging.getLogger(__name__)

LOADED = 0.9  # the fraction at which the weights are in


def start_on_cpu(begin: Beginning) -> Started:
    """Raises FtError or MemoryError."""
    config, checkpoint, progress = begin.config, begin.checkpoint, begin.progress
    memory = begin.available()
    token_bytes = estimate.kv_bytes_per_token(checkpoint.text_config, begin.dtype.value)
    weight_bytes = begin.sizes.dense + begin.sizes.banks
    check_memory(config, weight_bytes, token_bytes, memory.value, memory.reason)

    def loading(stage: str, done: float) -> None:
        progress(stage, LOADED * done)

    options = ModelOptions(begin.dtype.value, threads=begin.threads.value, progress=loading, source=begin.weights)
    model = load(checkpoint, options)
    if saving := advice(begin.weights, checkpoint.path, weight_bytes, begin.timeline.mark("weights")):
        log.info(saving)
    return serve_on_cpu(begin, model, memory)


def serve_on_cpu(begin: Beginning, model: Model, memory: Resolved[int]) -> Started:
    """From a loaded model on. memory: bytes that were available before it was loaded."""
    leave_cores_to(model)
    begin.progress("allocating the cache", LOADED)
    engine, plan = build_engine(begin.config, model)
    begin.progress("warming up", 0.95)
    engine.warm_up()
    begin.timeline.mark("warm-up")
    below = open_below(begin, engine.cache, model.cache_layout, plan.below, "cpu")
    begin.timeline.mark("prompts")
    known = {
        "context_length": plan.context,
        "max_running": plan.max_running,
        "kv_tokens": plan.kv_tokens,
        "state_slots": plan.state_slots,
        **below.facts(plan.cache_device),
        "prefill_chunk": resolve_prefill(begin.config),
        "memory_bytes": memory,
    }
    return Started(engine, plan.context.value, plan.max_running.value, plan.kv_tokens.value, known)


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
    budget = PrefillBudget(resolve_prefill(config).value, page_size, config.step_seconds)
    return Engine(model, cache, limits, budget), plan
