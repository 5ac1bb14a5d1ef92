"""What it means that the probe of GPUs does not answer. Imports little: it is told where time is short."""

from __future__ import annotations

from ftlaunch.machine.probe import Silence
from ftlaunch.machine.verdict import Finding

DRIVER = "the NVIDIA driver"


def silent(silence: Silence) -> list[Finding]:
    if silence.waits != DRIVER:  # a busy machine, on which the probe did not get as far as that
        return [silence.unknown()]
    if silence.quick:
        cost = "if it hangs, a server waits for it at every start and computes on the CPU; if it slept, it needs longer"
        return [silence.probe.unknown(f"{DRIVER} gave {silence.reason}", "warn").but("warn", cost, "ft doctor")]
    value, data = f"{DRIVER} hangs: {silence.reason}", {"probe": silence.probe.name}
    cost = "a server waits for it at every start, and then computes on the CPU"
    mend = "nvidia-smi; if that hangs too, restart the machine"
    return [Finding(silence.probe.answer, "driver", value, "bad", cost, mend, data)]
