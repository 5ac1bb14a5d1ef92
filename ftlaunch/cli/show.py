"""`ft show`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ftlaunch.cli.output import Output, json_option

if TYPE_CHECKING:
    from ftlaunch.store.describe import Description, Fact, Part

FACTS = ("FACT", "VALUE", "FROM")
PARTS = ("PART", "SIZE", "PARAMETERS", "FORMATS")
LOSSES = ("QUANTIZED", "FORMAT", "MATRICES", "MEAN ERROR", "WORST", "WHICH")


@click.command()
@click.argument("model", metavar="NAME|DIR|FILE")
@click.option(
    "--fit", is_flag=True, help="Whether it fits this machine and how it would be served, also before a pull."
)
@click.option("--explain", is_flag=True, help="With --fit: what the predicted times consist of.")
@click.option("--flags", default="", metavar='"FLAGS"', help="With --fit: as ft serve would with these flags.")
@json_option
def command(model: str, fit: bool, explain: bool, flags: str, as_json: bool) -> int:
    """Show what a model is, without loading it.

    The model is one of the store or the Hugging Face cache, a directory (safetensors or FTW), or a GGUF file. Shown are
    its architecture, experts and parameters, its bytes by part and number format, the template and parsers that serving
    would choose, and where each fact came from. Active parameters are those that one token meets: everything but the
    experts that are not chosen for it. For FTW that was quantized, the relative error that this made.

    --fit tells instead what it needs of this machine: host memory, the GPU's memory, memory to be pinned, room on the
    disk; where its experts would be computed, how many have a slot, the context, and how fast it would be: the range
    that decoding and a first prompt will lie in, and what was served if it has been. Of a model that is not here, only
    the headers are fetched. Exits as `ft doctor` does.
    """
    from ftlaunch.cli.fit import show_fit

    output = Output(as_json)
    for name, given in (("--explain", explain), ("--flags", flags)):
        if given and not fit:
            raise click.UsageError(f"{name} goes with --fit")
    if fit:
        return show_fit(output, model, explain, flags)
    from ftlaunch.cli.list import size
    from ftlaunch.store.describe import describe
    from ftlaunch.store.find import find

    description = describe(find(model))
    if as_json:
        output.result("", _data(description))
        return 0
    output.table(FACTS, [[fact.label, _value(fact), fact.source] for fact in description.facts], None, "")
    output.say("")
    parts = description.parts
    rows = [[_name(part), size(part.bytes), _count(part.parameters), ", ".join(part.formats)] for part in parts]
    output.table(PARTS, rows, None, "")
    if description.losses:
        output.say("")
        losses = [
            [loss.part, loss.format, str(loss.matrices), f"{loss.mean:.3%}", f"{loss.worst:.3%}", loss.worst_matrix]
            for loss in description.losses
        ]
        output.table(LOSSES, losses, None, "")
    return 0


def _data(description: Description) -> dict[str, Any]:
    facts = {fact.label.replace(" ", "_"): {"value": fact.value, "from": fact.source} for fact in description.facts}
    return {
        "facts": facts,
        "parts": [asdict(part) for part in description.parts],
        "quantization": [asdict(loss) for loss in description.losses],
    }


def _value(fact: Fact) -> str:
    from ftlaunch.cli.list import ago, size

    if fact.label == "last used":
        return ago(fact.value)
    if fact.value is None:
        return "-"
    if fact.label == "bytes":
        return size(fact.value)
    return _count(fact.value) if "parameters" in fact.label else str(fact.value)


def _name(part: Part) -> str:
    return part.name if part.loaded else f"{part.name} (not loaded)"


def _count(count: int) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 1e9 else f"{count / 1e6:.2f} million"
