"""Which version of the native kernels runs: what FT_ISA names, else the one measured fastest here. Torch-free."""

from __future__ import annotations

import os

from ftengine.config import Resolved
from ftengine.errors import ConfigError
from ftengine.kernels import native


def choose_kernels() -> Resolved[str]:
    """Puts the choice into force and tells why. Raises ConfigError for an FT_ISA that does not run here."""
    wanted = os.environ.get("FT_ISA", "").strip().lower()
    if not native.AVAILABLE:
        if wanted:
            raise ConfigError(f"FT_ISA={wanted} cannot be had: {native.REASON}", "unset FT_ISA")
        return Resolved("torch", native.REASON)
    if wanted:
        known = native.instruction_sets()
        if wanted not in known:
            raise ConfigError(
                f"FT_ISA={wanted} cannot be executed by this processor, which runs {', '.join(known)}",
                "unset FT_ISA, or set it to one of these",
            )
        native.use_kernels(wanted, "FT_ISA")
    return Resolved(*native.kernel_choice())
