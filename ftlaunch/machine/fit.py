"""Whether a model fits this machine and how it would be served, from its headers alone and with the engine's own plans.

`Fit` keeps what a prediction of speed is made of: `sizes`, `demand`, `lanes` and `plan`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ftengine.config import EngineConfig
from ftengine.errors import FtError
from ftengine.formats.format import ExpertLayout
from ftengine.memory import estimate
from ftengine.memory.estimate import WeightSizes
from ftengine.memory.plan import (
    check_banks,
    check_context,
    check_memory,
    lane_threads,
    plan_cache,
    resolve_dtype,
    resolve_threads,
)
from ftengine.memory.vram import Demand, DevicePlan, budget, least_bytes, plan_device
from ftengine.models.base import ARCHITECTURES
from ftengine.models.gpu.strategy import Choice, Lanes, choose, hit_rate
from ftengine.weights.checkpoint import Checkpoint
from ftengine.weights.facts import weight_facts
from ftengine.weights.source import Described
from ftlaunch.machine.verdict import gib

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
PROCESS = {"cpu": 1 << 30, "cuda": 3 << 29}  # bytes of host memory beside weights and caches: torch, its libraries


@dataclass(frozen=True)
class Room:
    """What a machine has to offer. Bytes; vram: what the engine may find free on its GPU, 0 without one."""

    memory: int
    bound: str  # what sets that
    vram: int = 0
    gpu: str = ""
    pin: int | None = None  # the most that can be pinned, where that is known


@dataclass(frozen=True)
class Model:
    """What a model asks for, told from its headers. layout: of its routed experts, None without."""

    path: Path
    architecture: str
    sizes: WeightSizes
    dtype: str  # of keys, values and activations on a GPU
    demand: Demand
    layout: ExpertLayout | None
    text_config: dict[str, Any] = field(repr=False)
    embedding: int = 0  # bytes of `sizes.dense` that a token reads one row of; 0 where the head is the same matrix
    products: int = 0  # multiplications a token of a prompt takes: elements of all matrices but embedding and head

    @property
    def served(self) -> bool:
        return self.architecture in ARCHITECTURES


@dataclass(frozen=True)
class Fit:
    """reason: why it does not fit, a clause, else empty. Bytes; memory: of the host, at the least on the CPU.

    pinned: bytes that the GPU is to read in host memory. context: tokens. slots: experts that stay on the GPU.
    threads: of the CPU, those that compute experts or, without a GPU, everything. dtype: of activations.
    """

    device: Literal["cuda", "cpu"]
    reason: str = ""
    next_step: str = ""
    memory: int = 0
    vram: int = 0
    pinned: int = 0
    context: int = 0
    slots: int = 0
    threads: int = 1
    dtype: str = "bfloat16"
    strategy: Choice | None = None
    plan: DevicePlan | None = None
    lanes: Lanes | None = None
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return not self.reason


def read(path: Path, asked: str = "auto") -> Model:
    """Raises CheckpointError for files that are no model. Reads headers only; torch-free. asked: EngineConfig.dtype."""
    checkpoint = Checkpoint.open(path)
    config, dtype = checkpoint.text_config, resolve_dtype(asked, device="cuda").value
    facts = weight_facts(checkpoint)
    demand = Demand.of(estimate.weight_sizes(facts, config), config, dtype, checkpoint.max_context)
    return described(path, checkpoint.architecture, facts, config, demand, dtype)


def described(
    path: Path, architecture: str, facts: Described, config: dict[str, Any], demand: Demand, dtype: str = "bfloat16"
) -> Model:
    """dtype: of keys, values and activations on a GPU."""
    layout = next(iter(estimate.expert_layouts(facts, config)), None)
    products = _dense_products(facts) + expert_products(config, layout, demand.weights.layers)
    return Model(path, architecture, demand.weights, dtype, demand, layout, config, _embedding(facts), products)


def expert_products(config: dict[str, Any], layout: ExpertLayout | None, layers: int) -> int:
    """Of the routed experts that one token meets."""
    if layout is None:
        return 0
    return 3 * layers * estimate.experts_per_token(config) * layout.hidden * layout.intermediate


def _embedding(facts: Described) -> int:
    found = facts.tensors().get(EMBEDDING)
    if found is None or HEAD not in facts.tensors():
        return 0
    return found.format.matrix_bytes(*found.shape)


def _dense_products(facts: Described) -> int:
    matrices = ((name, each.shape) for name, each in facts.tensors().items() if len(each.shape) == 2)
    return sum(
        shape[0] * shape[1]
        for name, shape in matrices
        if name not in (EMBEDDING, HEAD) and not estimate.EXPERT.fullmatch(name)
    )


def fit(model: Model, room: Room, lanes: Lanes | None = None, config: EngineConfig | None = None) -> Fit:
    """As `ft serve` would decide it, without further flags or with those that `config` stands for.

    lanes: what they cost here, None where it is not known.
    """
    config = config or EngineConfig(str(model.path))
    if not model.served:
        reason = f"the architecture {model.architecture} is not served"
        return Fit("cuda" if room.vram else "cpu", reason, "ft list")
    try:
        check_context(config, model.demand.max_context)
    except FtError as error:
        return Fit("cuda" if room.vram else "cpu", str(error), error.next_step)
    if not room.vram or config.device == "cpu":
        return _on_cpu(config, model, room)
    least, most = least_bytes(model.demand, config), budget(config, room.vram)
    if least > most.value:
        reason = f"it needs {gib(least)} of the {room.gpu} at the least, of which {gib(most.value)} can be used"
        return replace(_on_cpu(config, model, room), notes=(reason,))
    return _on_gpu(config, model, room, lanes)


def _on_gpu(config: EngineConfig, model: Model, room: Room, lanes: Lanes | None) -> Fit:
    sizes = model.sizes
    try:
        plan = plan_device(config, model.demand, room.vram)
    except FtError as error:
        return Fit("cuda", str(error), getattr(error, "next_step", ""), memory=sizes.banks + PROCESS["cuda"])
    made = Fit(
        "cuda",
        memory=sizes.banks + PROCESS["cuda"],
        vram=plan.used,
        pinned=sizes.banks,
        context=plan.context.value,
        slots=plan.slots.value,
        threads=lane_threads(config).value,
        dtype=model.dtype,
        plan=plan,
        lanes=lanes,
        notes=plan.notes,
    )
    try:
        check_banks(sizes.banks, room.memory, room.bound)
    except FtError as error:
        return replace(made, reason=str(error), next_step=getattr(error, "next_step", ""))
    if plan.resident or not sizes.total:
        choice = Choice("resident", f"all {sizes.total} experts fit into the GPU's memory", {})
    elif config.moe_backend == "auto" and room.pin is not None and sizes.banks > room.pin:
        choice = Choice("hybrid", "not all experts can be pinned: the CPU computes those without a slot", {})
    else:
        choice = choose(config.moe_backend, sizes.layers, sizes.experts, model.demand.top_k, plan.slots.value, lanes)
    return replace(made, strategy=choice, slots=0 if choice.strategy == "cpu" else made.slots)


def _on_cpu(config: EngineConfig, model: Model, room: Room) -> Fit:
    weights = model.sizes.dense + model.sizes.banks
    dtype = resolve_dtype(config.dtype).value
    token = estimate.kv_bytes_per_token(model.text_config, dtype)
    try:
        check_memory(config, weights, token, room.memory, room.bound)
        plan = plan_cache(config, model.demand.max_context, token, model.demand.state, room.memory - weights)
    except FtError as error:
        needed = weights + PROCESS["cpu"]
        return Fit("cpu", str(error), getattr(error, "next_step", ""), memory=needed)
    needed = weights + PROCESS["cpu"] + plan.context.value * token
    threads = resolve_threads(config.threads).value
    return Fit("cpu", memory=needed, context=plan.context.value, threads=threads, dtype=dtype)


def hits(fit: Fit, model: Model) -> float:
    """Share of a token's experts that is expected in slots."""
    return hit_rate(fit.slots / model.sizes.total) if model.sizes.total else 1.0
