"""Whether a model can be used on this machine, told before it is fetched."""

from __future__ import annotations

from dataclasses import dataclass

from ftlaunch.store.machine import Machine

BESIDE = 1 << 30  # what a server needs besides the weights, at the least: keys and values, activations, the program


@dataclass(frozen=True)
class Weights:
    """Bytes, as the files hold them. experts is 0 where the files do not tell."""

    total: int
    experts: int = 0


@dataclass(frozen=True)
class Fit:
    fits: bool
    text: str  # one sentence with the numbers


def judge(weights: Weights, machine: Machine) -> Fit:
    """All weights are kept in RAM, also where a GPU holds some of them."""
    dense = weights.total - weights.experts
    parts = f" (experts {_bytes(weights.experts)}, the rest {_bytes(dense)})" if weights.experts else ""
    has = f"this machine has {_bytes(machine.ram)} {machine.ram_limit}"
    needs = f"the weights take {_bytes(weights.total)}{parts}, {has}"
    if weights.total + BESIDE <= machine.ram:
        return Fit(True, f"{needs}: it fits")
    return Fit(False, f"{needs}: it does not fit into memory")


def _bytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
