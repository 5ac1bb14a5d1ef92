"""What a person is told of an engine that could not start. Torch-free."""

from __future__ import annotations

from ftengine.errors import FtError
from ftengine.memory.machine import NO_ADDRESS_LIMIT, address_limit
from ftengine.wire import Fatal

NO_MEMORY = ("allocate memory", "failed to map segment")  # torch's words, and the loader's of a library


def describe(error: Exception) -> Fatal:
    """One sentence for a person, and what may help."""
    if isinstance(error, FtError):
        return Fatal(str(error), error.next_step)
    if isinstance(error, MemoryError) or any(words in str(error) for words in NO_MEMORY):
        step = "ft serve --context 8192" if address_limit() is None else NO_ADDRESS_LIMIT
        return Fatal(f"the engine ran out of memory while starting: {str(error) or 'nothing says where'}", step)
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        return Fatal(f"the engine could not start: the Python package {error.name} is missing", "ft doctor")
    return Fatal(f"the engine could not start: {type(error).__name__}: {error}", "FT_DEBUG=1 ft serve")
