"""The start on a GPU: plan, CUDA, weights, caches, strategy, graphs, warm-up, and the plan beside what was measured."""

from __future__ import annotations

import dataclasses
import gc
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ftengine import switches
from ftengine.cache.sequences import SequenceCache
from ftengine.cache.tensors import allocate_cache, kv_bytes_per_token, state_bytes
from ftengine.config import EngineConfig, Resolved
from ftengine.core import CacheLayout, Request, SamplingParams
from ftengine.errors import ConfigError, FtError
from ftengine.experts.pinned import PinLimits, pin_limits
from ftengine.kernels.triton.delta_prefill import load_library
from ftengine.kernels.triton.precompile import load_compiler, load_sources
from ftengine.kernels.triton.tuning import use_cache
from ftengine.memory import gpu_errors
from ftengine.memory.folders import cache_folder
from ftengine.memory.gpu import INIT_SECONDS, ON_CPU, Gpu, refuse_without_gpu, within
from ftengine.memory.plan import check_banks, usable
from ftengine.memory.prompts import Below, plan_below
from ftengine.memory.sizes import gigabytes
from ftengine.memory.vram import Demand, DevicePlan, budget, least_bytes, plan_device
from ftengine.models.base import ModelOptions, load
from ftengine.models.gpu.decoder import GpuDecoder
from ftengine.models.gpu.setup import GpuSetup, policy_asked_for, prefetch_asked_for
from ftengine.scheduler.beginning import Beginning, Started
from ftengine.scheduler.chunk import PrefillBudget
from ftengine.scheduler.cores import keep_off_cores
from ftengine.scheduler.engine import Engine
from ftengine.scheduler.jobs import Limits
from ftengine.scheduler.lanes import LaneChoice, choose_lanes
from ftengine.scheduler.prompt_cache import open_below
from ftengine.scheduler.reading import short_turns
from ftengine.scheduler.start_cpu import serve_on_cpu
from ftengine.weights.ftw.advice import advice
from ftengine.wire import Failed

log = logging.getLogger(__name__)

LOADED, PREPARED, COMPILED = 0.6, 0.7, 0.95  # fractions of the start
WARM_PROMPTS = (97,)  # tokens of prompts computed before the first request, besides the largest step


def start_on_gpu(begin: Beginning, gpu: Gpu, device: Resolved[str]) -> tuple[Resolved[str], Started | None]:
    """The device that came of it, and the engine; None where the choice was free and the CPU is the better one.

    Raises FtError or MemoryError.
    """
    demand = demand_of(begin)
    room = budget(begin.config, gpu.free)
    if begin.config.device == "auto" and least_bytes(demand, begin.config) > room.value:
        return Resolved("cpu", _too_small(gpu, least_bytes(demand, begin.config), room)), None
    plan = plan_device(begin.config, demand, gpu.free)
    switches.check()
    memory = begin.available()
    check_banks(begin.sizes.banks, memory.value, memory.reason)
    check_pinning(begin.config, begin.sizes.banks, pin_limits())
    left = usable(memory.value) - begin.sizes.banks
    below = plan_below(begin.config, demand.token, demand.state, left, device=device.value)
    try:
        return _load(begin, gpu, device, demand, plan, below)
    except FtError:
        raise
    except RuntimeError as error:
        raise _explained(error, plan, demand) from error


def check_pinning(config: EngineConfig, banks: int, limits: PinLimits) -> None:
    """Before anything is read: what Windows will hardly pin. Raises ConfigError where nothing works without.

    RLIMIT_MEMLOCK tells nothing: most drivers pin without regard to it.
    """
    if not limits.wsl or not (why := limits.explain(banks)):
        return
    if config.moe_backend == "offload":
        raise ConfigError(
            f"--moe-backend offload needs {gigabytes(banks)} of pinned memory{why}", "ft serve --moe-backend auto"
        )
    log.warning("pinning %s of experts will probably be refused%s", gigabytes(banks), why)


def demand_of(begin: Beginning) -> Demand:
    """From headers and config.json."""
    checkpoint = begin.checkpoint
    return Demand.of(begin.sizes, checkpoint.text_config, begin.dtype.value, checkpoint.max_context)


def _load(
    begin: Beginning, gpu: Gpu, device: Resolved[str], demand: Demand, plan: DevicePlan, below: Below
) -> tuple[Resolved[str], Started]:
    memory = begin.available()
    _use_gpu(begin, gpu, plan)
    begin.timeline.mark("CUDA")
    if device.value == "cuda":
        threading.Thread(target=_load_compilers, args=(begin,), name="import", daemon=True).start()
    options = ModelOptions(
        begin.dtype.value,
        device=device.value,
        threads=begin.threads.value,
        progress=_part(begin, 0.0, LOADED),
        source=begin.weights,
    )
    with short_turns():
        model = load(begin.checkpoint, options)
    seconds = begin.timeline.mark("weights")
    if saving := advice(begin.weights, begin.checkpoint.path, begin.sizes.dense + begin.sizes.banks, seconds):
        log.info(saving)
    if not isinstance(model, GpuDecoder):
        reason = f"{begin.checkpoint.architecture} is computed on the CPU only"
        refuse_without_gpu(begin.config, reason)
        log.warning("the %s stays unused: %s", gpu.name, reason)
        return Resolved("cpu", reason), serve_on_cpu(begin, model, memory)
    torch.set_num_threads(1)  # its threads would spin beside those that compute experts
    _trim(model.device)
    plan = plan_device(begin.config, _measured(demand, model, model.cache_layout), gpu.free)
    started = _serve(begin, gpu, model, demand, plan, below)
    return device, dataclasses.replace(started, facts={**started.facts, "memory_bytes": memory})


def _serve(begin: Beginning, gpu: Gpu, model: GpuDecoder, demand: Demand, plan: DevicePlan, below: Below) -> Started:
    config, progress, timeline = begin.config, begin.progress, begin.timeline
    progress("allocating the cache", LOADED)
    pages, slots = plan.kv_tokens.value // config.page_size, plan.state_slots.value
    where = "interpret" if model.device.type == "cpu" else model.device.type
    tensors = allocate_cache(model.cache_layout, pages, config.page_size, slots, where)
    timeline.mark("cache")
    progress("preparing experts", LOADED)
    lanes = choose_lanes(config, model.banks, demand.top_k, plan, model.weights.dtype, model.device, cache_folder())
    timeline.mark("lanes")
    plan = _given_out(plan, demand, lanes)
    setup = GpuSetup(
        strategy=lanes.strategy.value,
        max_running=plan.max_running.value,
        context=plan.context.value,
        page_size=config.page_size,
        slots=plan.slots.value,
        staging=plan.staging.value,
        threads=lanes.threads.value,
        readable=lanes.pinned.value,
        costs=lanes.costs,
        prefetch=prefetch_asked_for(),
        policy=policy_asked_for(),
        rest="at first" if lanes.rests else "where faster",
    )
    model.prepare(setup)
    timeline.mark("experts")
    limits = Limits(plan.context.value, plan.max_running.value, model.vocab_size, model.eos_token_ids)
    chunk = plan.prefill_chunk.value
    model.warm_up(tensors, _part(begin, PREPARED, COMPILED), min(chunk, limits.context))
    timeline.mark("graphs")
    prefill = PrefillBudget(chunk, config.page_size, config.step_seconds, first=chunk)
    engine = Engine(model, SequenceCache(tensors, pages, slots), limits, prefill)
    progress("warming up", COMPILED)
    if model.device.type == "cuda":  # the interpreter compiles nothing
        warm_prefill(engine, [*WARM_PROMPTS, chunk])
    engine.warm_up()
    timeline.mark("warm-up")
    report(plan, demand, gpu, model.device)
    below = open_below(begin, engine.cache, model.cache_layout, below, where)
    timeline.mark("prompts")
    if setup.uses_cpu:
        keep_off_cores(setup.threads)
    known = {**_facts(gpu, plan, lanes), **below.facts(plan.cache_device)}
    return Started(engine, plan.context.value, plan.max_running.value, plan.kv_tokens.value, known)


def warm_prefill(engine: Engine, lengths: Sequence[int]) -> None:
    """Computes prompts of these lengths, as far as they fit, so that no request pays for compiling or for memory.

    Raises RuntimeError if a prompt fails.
    """
    fitting = min(engine.scheduler.limits.context - 2, (engine.cache.pages.count - 1) * engine.cache.page_size)
    # The longest first: what it takes is kept by torch and divided among shorter ones.
    for length in sorted({min(length, fitting) for length in lengths}, reverse=True):
        if length < 1:
            continue
        prompt = [token % engine.model.vocab_size for token in range(length)]
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        events = engine.submit(Request(f"warm-up of {length}", prompt, params))
        while engine.has_work:
            events += engine.admit() + engine.step()
        for event in events:
            if isinstance(event, Failed):
                raise RuntimeError(f"{event.message} (computing {length} tokens)")
        engine.cache.clear()


def report(plan: DevicePlan, demand: Demand, gpu: Gpu, device: torch.device) -> None:
    """The plan, and beside it what torch then used at the most and what is gone of the GPU's free memory."""
    parts = ", ".join(f"{name} {gigabytes(size)}" for name, size in plan.parts(demand).items() if size)
    log.info("GPU memory: %s of %s planned: %s", gigabytes(plan.used), gigabytes(plan.budget.value), parts)
    for note in plan.notes:
        log.info("%s", note)
    if device.type != "cuda":
        return
    peak, held = torch.cuda.max_memory_allocated(device), torch.cuda.memory_reserved(device)
    gone = gpu.free - torch.cuda.mem_get_info(device)[0]
    log.info("GPU memory: %s used at the most, %s held, %s gone of what was free", *map(gigabytes, (peak, held, gone)))
    if peak > plan.used:
        log.warning("GPU memory: %s more than planned were used", gigabytes(peak - plan.used))
    if gone > plan.budget.value:
        log.warning(
            "GPU memory: %s over the budget are gone; kernels and graphs need some besides, other programs may, too",
            gigabytes(gone - plan.budget.value),
        )


def _use_gpu(begin: Beginning, gpu: Gpu, plan: DevicePlan) -> None:
    """CUDA's context, in bounded time, and the budget as torch's own limit. Raises ConfigError."""
    use_cache(cache_folder())
    if begin.config.device == "interpret":
        return
    begin.progress("starting CUDA", 0.0)
    within(INIT_SECONDS, _first_contact, "starting CUDA")
    torch.cuda.set_per_process_memory_fraction(min(1.0, plan.budget.value / gpu.total))


def _first_contact() -> None:
    """Everything that a driver may take its time for: the context, a kernel's code, a copy back."""
    torch.ones(1, device="cuda").item()


def _load_compilers(begin: Beginning) -> None:
    """While weights are read."""
    load_compiler()
    if begin.checkpoint.text_config.get("linear_num_value_heads"):
        load_library()
    load_sources()
    gc.freeze()  # as after torch's import: these modules live on, too


def _trim(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _measured(demand: Demand, model: GpuDecoder, layout: CacheLayout) -> Demand:
    """With what the loaded model really takes."""
    weights = demand.weights
    if model.device.type == "cuda":
        weights = dataclasses.replace(weights, dense=torch.cuda.memory_allocated(model.device))
    return dataclasses.replace(demand, weights=weights, token=kv_bytes_per_token(layout), state=state_bytes(layout))


def _given_out(plan: DevicePlan, demand: Demand, lanes: LaneChoice) -> DevicePlan:
    """Less what the chosen strategy leaves alone: `auto` may end at `cpu`, where no expert stays on the GPU."""
    if lanes.strategy.value != "cpu" or not plan.slots.value:
        return plan
    unused = plan.slots.value * demand.weights.block + plan.next_routers
    none = Resolved(0, f"moe_backend cpu: the CPU computes them in decode; {plan.slots.value} would fit")
    return dataclasses.replace(plan, slots=none, next_routers=0, used=plan.used - unused, notes=())


def _part(begin: Beginning, low: float, high: float) -> Callable[[str, float], None]:
    def progress(stage: str, done: float) -> None:
        begin.progress(stage, low + (high - low) * done)

    return progress


def _facts(gpu: Gpu, plan: DevicePlan, lanes: LaneChoice) -> dict[str, Resolved[Any]]:
    works = lanes.strategy.value in ("cpu", "hybrid")
    return {
        "gpu": Resolved(gpu.name, f"compute capability {gpu.capability[0]}.{gpu.capability[1]}"),
        "gpu_memory_bytes": plan.budget,
        "context_length": plan.context,
        "max_running": plan.max_running,
        "kv_tokens": plan.kv_tokens,
        "state_slots": plan.state_slots,
        "prefill_chunk": plan.prefill_chunk,
        "moe_backend": lanes.strategy,
        "moe_cache_size": plan.slots,
        "moe_staging": plan.staging,
        **({"moe_cpu_threads": lanes.threads} if works else {}),
        "moe_pinned": lanes.pinned,
    }


def _too_small(gpu: Gpu, least: int, room: Resolved[int]) -> str:
    return (
        f"the {gpu.name} is too small: {gigabytes(least)} are the least that this model needs there, "
        f"{gigabytes(room.value)} can be used ({room.reason})"
    )


def _explained(error: RuntimeError, plan: DevicePlan, demand: Demand) -> Exception:
    """A sentence for what torch and Triton say in paragraphs; other errors stay as they are."""
    first = str(error).strip().partition("\n")[0]
    if gpu_errors.is_out_of_memory(error):
        parts = ", ".join(f"{name} {gigabytes(size)}" for name, size in plan.parts(demand).items() if size)
        return ConfigError(
            f"the GPU's memory ran out during the start; of {gigabytes(plan.budget.value)} ({plan.budget.reason}) were "
            f"planned: {parts}; {first}",
            "ft serve --memory-ratio 0.8, or ft serve --max-prefill-length 512",
        )
    if gpu_errors.is_fatal(error):
        return ConfigError(f"the GPU fails during the start: {first}", ON_CPU)
    return error
