"""Converts a model: reading, packing, hashing and writing overlap, because each thread does whole units of work."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import msgspec
import torch

from ftengine.errors import CheckpointError, FtError
from ftengine.weights.checkpoint import Checkpoint
from ftengine.weights.convert.compare import compare
from ftengine.weights.convert.destination import destination
from ftengine.weights.convert.losses import Losses
from ftengine.weights.convert.plan import Options, Plan, make_plan
from ftengine.weights.convert.units import ExpertRange, Unit, Worker, units
from ftengine.weights.ftw.layout import VERSION, Attachment, Header, Origin
from ftengine.weights.ftw.verify import verify
from ftengine.weights.ftw.writer import SectionWriter, write_file, write_header
from ftengine.weights.open import open_source
from ftengine.weights.source import WeightSource

Progress = Callable[[str, float], None]  # stage, fraction 0..1

MIN_THREADS, MAX_THREADS = 4, 16  # threads wait for disks too, so that few cores want more threads than they are
WRITING, CHECKING, COMPARING = "writing", "checking every byte", "comparing with the source"
SPARE_BYTES = 64 << 20  # left on the disk for headers, tokenizers and the file system's own use


def convert(
    model: Path,
    out: Path,
    options: Options,
    origin: Origin,
    progress: Progress = lambda stage, done: None,
    on_wait: Callable[[str], None] = lambda text: None,
) -> Header:
    """Writes the FTW directory `out` from the model folder or GGUF file `model`; `out` is replaced at the very end.

    Raises FtError: `out` must not be replaced, the disk is full or fails; CheckpointError: the model cannot be read,
    or what was written is not what was read.
    """
    checkpoint = Checkpoint.open(model)
    with open_source(checkpoint) as source, destination(out, on_wait) as place:
        check_apart(checkpoint.path, place.final)
        plan = make_plan(source, options)
        small = _small_files(checkpoint)
        check_space(place.final.parent, plan.total_bytes + sum(map(len, small.values())))
        losses = Losses()
        with _single_threaded_torch():
            hashes = _write(source, plan, place.partial, losses, progress)
        header = _header(checkpoint, plan, hashes, small, losses, origin)
        for name, content in small.items():
            write_file(place.partial / name, content)
        write_header(place.partial, header)
        if options.verify:
            _verify(source, place.partial, progress)
        place.commit()
    return header


def check_apart(model: Path, out: Path) -> None:
    """Raises FtError when `out` is the model itself: what a rounding loses could not be brought back."""
    if out.exists() and out.samefile(model):
        raise FtError(f"{out} is the model itself", "give another --out")


def check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed + SPARE_BYTES:
        raise FtError(
            f"{folder} has {free / 1e9:.1f} GB free, the conversion writes {needed / 1e9:.1f} GB",
            "free some, or give --out on another disk",
        )


Hashes = dict[tuple[str, int], str]  # by a tensor's name and 0, or by "experts" and layer << 16 | expert


def _write(source: WeightSource, plan: Plan, folder: Path, losses: Losses, progress: Progress) -> Hashes:
    count = min(MAX_THREADS, max(MIN_THREADS, os.cpu_count() or 1))
    hashes: Hashes = {}
    with (
        SectionWriter(folder, plan.files) as writer,
        ThreadPoolExecutor(count, "ftw-convert") as pool,
    ):
        worker = Worker(source, writer, losses, _counter(plan.total_bytes, progress))
        for unit, found in _results(pool, worker.do, units(plan), 2 * count):
            if isinstance(unit, ExpertRange):
                numbers = range(unit.first, unit.last)
                hashes |= {_key(unit.section.layer, e): digest for e, digest in zip(numbers, found, strict=True)}
            else:
                hashes[unit.name, 0] = found[0]
        writer.sync()
    return hashes


def _key(layer: int, expert: int) -> tuple[str, int]:
    return "experts", layer << 16 | expert


def _results(
    pool: ThreadPoolExecutor, do: Callable[[Unit], list[str]], work: Iterable[Unit], ahead: int
) -> Iterator[tuple[Unit, list[str]]]:
    """Results as they come, so that one large unit holds up no other; at most `ahead` units are begun at a time."""
    running: dict[Future[list[str]], Unit] = {}
    try:
        for unit in work:
            running[pool.submit(do, unit)] = unit
            if len(running) >= ahead:
                yield from _finished(running)
        while running:
            yield from _finished(running)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _finished(running: dict[Future[list[str]], Unit]) -> Iterator[tuple[Unit, list[str]]]:
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        yield running.pop(future), future.result()


def _counter(total: int, progress: Progress) -> Callable[[int], None]:
    lock, done = threading.Lock(), 0

    def count(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes
            progress(WRITING, done / total)

    progress(WRITING, 0.0)
    return count


@contextmanager
def _single_threaded_torch() -> Iterator[None]:
    """The units run side by side already."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _small_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Configuration, tokenizer and template. What the source says of its quantization does not hold for the copy."""
    files = checkpoint.small_files()
    config = dict(checkpoint.config)
    text = config.get("text_config")
    found = config.pop("quantization_config", None) is not None
    if isinstance(text, dict) and "quantization_config" in text:
        found = True
        config["text_config"] = {key: value for key, value in text.items() if key != "quantization_config"}
    if found:
        files["config.json"] = msgspec.json.format(msgspec.json.encode(config), indent=2)
    return files


def _header(
    checkpoint: Checkpoint,
    plan: Plan,
    hashes: Hashes,
    small: dict[str, bytes],
    losses: Losses,
    origin: Origin,
) -> Header:
    tensors = [msgspec.structs.replace(section, sha256=hashes[section.name, 0]) for section in plan.tensors]
    experts = [
        msgspec.structs.replace(section, sha256=tuple(hashes[_key(section.layer, e)] for e in range(section.experts)))
        for section in plan.experts
    ]
    return Header(
        version=VERSION,
        architecture=checkpoint.architecture,
        origin=origin,
        files=plan.files,
        tensors=tuple(tensors),
        experts=tuple(experts),
        attachments=tuple(
            Attachment(name, len(content), sha256(content).hexdigest()) for name, content in sorted(small.items())
        ),
        quantization=tuple(losses.summary()),
    )


def _verify(source: WeightSource, folder: Path, progress: Progress) -> None:
    progress(CHECKING, 0.0)
    faults = verify(folder, lambda done, total: progress(CHECKING, done / total))
    if faults:
        raise CheckpointError(
            f"what was read back is not what was written: {faults[0]}", "check the disk, and convert again"
        )
    progress(COMPARING, 0.0)
    compare(source, folder, lambda done: progress(COMPARING, done))
