"""`ft serve`."""

from __future__ import annotations

from typing import Any

import click

from ftlaunch.cli.sizes import MOST, Share, size
from ftlaunch.servers.options import DEFAULT_HOST, DEFAULT_PORT, ServeOptions

AT_LEAST_ONE = click.IntRange(1, MOST)
NOT_NEGATIVE = click.IntRange(0, MOST)
THREADS = click.IntRange(1, 4096)  # those that no CPU is there for are not started
CONTEXT = click.IntRange(2, MOST)  # a token of a prompt and one of an answer
KV_TOKENS = click.IntRange(256, MOST)  # a template and a question take a hundred
REQUESTS = click.IntRange(1, 256)  # the server has so many, with those that wait (api/settings.py)
CACHE_SIZES = ("moe_cache_size", "moe_cache_rate", "moe_cache_mem")


@click.command()
@click.argument("which", metavar="[NAME|DIR|FILE]", required=False)
@click.option(
    "--model",
    metavar="NAME|DIR|FILE",
    help="A model of the store or the Hugging Face cache, a directory (safetensors or FTW), or a GGUF file.",
)
@click.option(
    "--host",
    default=DEFAULT_HOST,
    show_default=True,
    help="Address to listen on; one other than loopback needs --api-key.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=DEFAULT_PORT,
    show_default=True,
    help="Port to listen on; 0: any free one.",
)
@click.option(
    "--api-key",
    envvar="FT_API_KEY",
    show_envvar=True,
    help="Key that clients must send. The variable hides it from other users' process lists.",
)
@click.option("--served-model-name", metavar="NAME", help="The model's id in the APIs.  [default: the model's name]")
@click.option(
    "--context",
    type=CONTEXT,
    metavar="TOKENS",
    help="Prompt and answer together.  [default: what the model and the memory allow]",
)
@click.option(
    "--max-running-requests",
    type=REQUESTS,
    metavar="N",
    help="Answers computed at the same time; further requests wait.  [default: chosen]",
)
@click.option(
    "--max-output-tokens",
    type=AT_LEAST_ONE,
    metavar="TOKENS",
    help="Upper limit of every answer.  [default: what the context leaves]",
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16"]),
    default="auto",
    show_default=True,
    help="Type that weights are kept and computed in.",
)
@click.option(
    "--threads", type=THREADS, metavar="N", help="CPU threads that compute, at most one a CPU.  [default: one a CPU]"
)
@click.option(
    "--max-prefill-length",
    type=AT_LEAST_ONE,
    metavar="TOKENS",
    help="Most prompt tokens computed in one step.  [default: 8192 on a GPU, else 2048]",
)
@click.option(
    "--kv-tokens",
    type=KV_TOKENS,
    metavar="TOKENS",
    help="Keys and values kept, over all requests and the prefix cache.  [default: chosen]",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cuda", "cpu"]),
    default="auto",
    show_default=True,
    help="auto: an NVIDIA GPU if there is one that can be used.",
)
@click.option(
    "--memory-ratio",
    type=Share(0.05, 1),
    metavar="SHARE",
    help="How much of the GPU's free memory is used.  [default: 0.9]",
)
@click.option(
    "--moe-backend",
    type=click.Choice(["auto", "resident", "offload", "cpu", "hybrid"]),
    default="auto",
    show_default=True,
    help="Experts without a place on the GPU: offload fetches them, cpu computes them where they lie, hybrid does both "
    "at once; resident wants a place for all.",
)
@click.option("--moe-cache-size", type=NOT_NEGATIVE, metavar="N", help="Experts kept on the GPU.  [default: what fits]")
@click.option("--moe-cache-rate", type=Share(0, 1), metavar="SHARE", help="The same, as a share of all.")
@click.option("--moe-cache-mem", type=size, metavar="BYTES", help="The same, in bytes: 6GiB, 800MB.")
@click.option(
    "--moe-cpu-threads",
    type=THREADS,
    metavar="N",
    help="CPU threads that compute experts beside the GPU.  [default: all but two, all but one below 8 CPUs]",
)
@click.option(
    "--cache-device",
    type=size,
    metavar="BYTES",
    help="Memory, the GPU's where there is one, for places that later prompts go on from; 0: none.  [default: chosen]",
)
@click.option(
    "--cache-host",
    type=size,
    metavar="BYTES",
    help="Host memory for copies of prompts that the GPU has no room for; 0: none.  [default: chosen]",
)
@click.option(
    "--cache-disk",
    type=size,
    metavar="BYTES",
    help="Files of prompts, which the next server begins with; 0: none.  [default: 20 GB, or a tenth of what is free]",
)
@click.option("--background", hidden=True, metavar="ID")
@click.option("--leased", hidden=True, is_flag=True)
def command(which: str | None, **options: Any) -> None:
    """Serve a model over HTTP until Ctrl-C.

    `ft serve NAME` is `ft serve --model NAME`.

    It answers the Anthropic Messages API (/v1/messages) and OpenAI's Chat Completions, Completions and Responses, and
    tells at /health how far loading is. Only programs on this machine can reach it, unless --host says otherwise.

    Everything chosen automatically is printed with its reason. `ft launch` starts servers by itself, in the background.
    """
    options["model"] = _model(which, options["model"])
    given = [f"--{name.replace('_', '-')}" for name in CACHE_SIZES if options[name] is not None]
    if len(given) > 1:
        raise click.UsageError(f"{' and '.join(given)} say the same in different ways: give one of them")
    from ftengine.errors import FtError, for_model
    from ftlaunch.servers.serve import serve

    try:
        serve(ServeOptions(**options))
    except FtError as error:
        error.next_step = for_model(error.next_step, options["model"])
        raise


def _model(which: str | None, option: str | None) -> str:
    if which is not None and option is not None:
        raise click.UsageError("the model is given twice: as an argument and as --model")
    model = which if option is None else option
    if model is None:
        raise click.UsageError("no model is named: ft serve NAME. `ft list` shows those that are here.")
    return model
