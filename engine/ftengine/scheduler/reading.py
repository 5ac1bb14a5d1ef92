"""Begins to read an FTW directory's weights while torch is imported, if memory holds them for certain. Torch-free.

Nothing is refused here: where a limit does not let reading begin, the start comes to it and says so, as without.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ftengine.config import EngineConfig, Resolved
from ftengine.errors import ConfigError
from ftengine.memory import estimate
from ftengine.memory.gpu import Gpu, NoGpu
from ftengine.memory.machine import available_memory
from ftengine.memory.plan import check_banks, check_memory, resolve_dtype
from ftengine.models.base import ARCHITECTURES
from ftengine.weights.checkpoint import Checkpoint
from ftengine.weights.ftw.files import FtwFiles

# Of memory that the import of torch takes meanwhile: 129 MiB of a build for the CPU (2.13), more of one for CUDA.
IMPORT_BYTES = 256 << 20
TURN_SECONDS = 1e-4  # of the interpreter, while a thread imports beside the reading of weights


def read_ahead(
    config: EngineConfig, checkpoint: Checkpoint, files: FtwFiles, gpu: Callable[[], Gpu | NoGpu]
) -> Resolved[int] | None:
    """The memory that was available for weights and all else before their reading began; None where it did not.

    All of them are read where a CPU could compute the model, whatever the device will be; where only the experts are
    sure to fit, they are read once it is known that there is a GPU for the others. gpu: waits for the driver.
    """
    if checkpoint.architecture not in ARCHITECTURES or _address_space_is_limited():
        return None
    memory, bound = available_memory()
    memory -= IMPORT_BYTES
    sizes = estimate.weight_sizes(files, checkpoint.text_config)
    if not _as_configured(files, checkpoint.text_config, sizes):
        return None
    layers = range(checkpoint.text_config["num_hidden_layers"])
    token = estimate.kv_bytes_per_token(checkpoint.text_config, resolve_dtype(config.dtype).value)
    if _holds(check_memory, config, sizes.dense + sizes.banks, token, memory, bound):
        files.read_ahead(layers, dense=True)
    elif config.device != "cpu" and _holds(check_banks, sizes.banks, memory, bound) and isinstance(gpu(), Gpu):
        files.read_ahead(layers, dense=False)
    else:
        return None
    return Resolved(memory, bound)


@contextlib.contextmanager
def short_turns() -> Iterator[None]:
    """Reading is many short calls, and each waits for the thread that imports to give up its turn: 5 ms by default."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(TURN_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _holds(check: Callable[..., None], *arguments: Any) -> bool:
    try:
        check(*arguments)
    except ConfigError:
        return False
    return True


def _as_configured(files: FtwFiles, text_config: Mapping[str, Any], sizes: estimate.WeightSizes) -> bool:
    """Whether the sections are those that the sizes, which are told from the configuration, count."""
    layers = text_config.get("num_hidden_layers")
    if type(layers) is not int or layers < 1:
        return False
    if any(estimate.EXPERT.fullmatch(tensor.name) for tensor in files.header.tensors):
        return False  # no FTW has experts there, and no sum counts them: the loading says so
    counted = [section for section in files.header.experts if section.layer < layers]
    return sum(section.extent for section in counted) == sizes.banks


def _address_space_is_limited() -> bool:
    """Importing takes some of it, too, and says in a worse way than the loading of weights that there is none left."""
    try:
        import resource
    except ImportError:
        return False
    kinds = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    return any(resource.getrlimit(kind)[0] != resource.RLIM_INFINITY for kind in kinds)
