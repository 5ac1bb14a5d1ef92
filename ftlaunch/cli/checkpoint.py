"""`ft checkpoint`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ftengine.weights.convert.plan import DENSE_FORMATS, EXPERT_FORMATS, KEEP, Options
from ftlaunch.cli.output import Output

if TYPE_CHECKING:
    from ftengine.weights.ftw.layout import Header

MOST_GIB = 1 << 33  # what a file system's 64 bits count


@click.command()
@click.option(
    "--model", required=True, metavar="NAME|DIR|FILE", help="A model of the store, a model folder, or a GGUF."
)
@click.option(
    "--out", required=True, metavar="DIR", type=click.Path(path_type=Path), help="The FTW directory to write."
)
@click.option(
    "--experts",
    type=click.Choice(EXPERT_FORMATS),
    default=KEEP,
    show_default=True,
    help="Number format of the routed experts.",
)
@click.option(
    "--dense",
    type=click.Choice(DENSE_FORMATS),
    default=KEEP,
    show_default=True,
    help="Number format of all other matrices, embedding and output head too.",
)
@click.option(
    "--shard-gib",
    type=click.FloatRange(min=0, min_open=True),
    metavar="N",
    help="Largest size of a data file; a layer's experts stay in one.  [default: no limit]",
)
@click.option("--verify", is_flag=True, help="Read everything back, and compare it with the source.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line for each event.")
def command(
    model: str, out: Path, experts: str, dense: str, shard_gib: float | None, verify: bool, as_json: bool
) -> None:
    """Convert a model into the layout that the engine runs from.

    Reads safetensors in BF16, F16, F32, FP8, NVFP4 and MXFP4, and GGUF. Writes an FTW directory, which starts faster
    and is all that `ft serve --model DIR` needs. With `keep` no value changes. Other formats round to the nearest
    number; `ft show` tells how much that lost. Routers, norms and other small tensors are never quantized.

    DIR appears when it is complete. If it is an FTW directory already it is replaced at the very end; anything else is
    left alone. Conversion needs no GPU and about as much memory as the largest layer.

    \b
    ft checkpoint --model qwen3-30b-a3b --out ~/models/qwen3-30b-a3b
    ft checkpoint --model qwen3-30b-a3b --out ~/models/qwen3-30b-a3b-nvfp4 --experts nvfp4 --verify
    """
    from ftengine.private import owner_writes
    from ftengine.weights.checkpoint import Checkpoint
    from ftlaunch.store.find import find
    from ftlaunch.store.origin import origin

    if shard_gib is not None and not shard_gib < MOST_GIB:  # nan too
        raise click.BadParameter(f"{shard_gib} is not below {MOST_GIB}.", param_hint="--shard-gib")
    found = find(model)
    Checkpoint.open(found.path)  # what is wrong with the model is said before anything heavy is loaded
    from ftengine.weights.convert.convert import convert

    output = Output()
    with _shown(output, as_json) as show, owner_writes():
        options = Options(experts, dense, shard_gib, verify)
        header = convert(found.path, out, options, origin(found), show, output.say)
    facts = _facts(out, header)
    if as_json:
        from ftlaunch.cli.transfer import json_line

        json_line({"event": "done", **facts})
    else:
        output.result(_text(out, header), facts)


@contextmanager
def _shown(output: Output, as_json: bool) -> Iterator[Callable[[str, float], None]]:
    if as_json:
        from ftlaunch.cli.transfer import JsonLines
        from ftlaunch.store.events import Stage

        with JsonLines().shown() as view:
            yield lambda stage, done: view(Stage(stage, done))
        return
    with output.progress() as show:
        yield lambda stage, done: show(stage[0].upper() + stage[1:], done)


def _facts(out: Path, header: Header) -> dict[str, Any]:
    return {
        "path": str(out.absolute()),
        "architecture": header.architecture,
        "bytes": sum(file.size for file in header.files),
        "files": [file.name for file in header.files],
        "experts_bytes": header.expert_bytes,
        "dense_bytes": header.dense_bytes,
        "quantization": [
            {"part": item.part, "matrices": item.matrices, "mean": item.mean, "worst": item.worst}
            for item in header.quantization
        ],
    }


def _text(out: Path, header: Header) -> str:
    from ftlaunch.cli.list import size

    lines = [f"Wrote {out} ({size(sum(file.size for file in header.files))})"]
    lines += [
        f"  {item.part}: relative error {item.mean:.2%} on average, {item.worst:.2%} at worst"
        for item in header.quantization
    ]
    return "\n".join([*lines, f"Serve it: ft serve --model {_typed(out)}"])


def _typed(out: Path) -> str:
    """As `--model` takes a directory and no name of the store."""
    import shlex

    text = str(out)
    return shlex.quote(text if text.startswith(("/", "./", "../", "~")) else f"./{text}")
