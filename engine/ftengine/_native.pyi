"""Types of the library built from csrc/."""

from typing import Any

def cpu_features() -> list[str]: ...
def instruction_sets() -> list[str]: ...
def moe_experts(
    hidden: Any,
    expert_ids: Any,
    weights: Any,
    gate_up: Any,
    down: Any,
    out: Any,
    threads: int = 1,
    isa: str = "",
) -> None: ...
