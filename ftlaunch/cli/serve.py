"""`ft serve`."""

from __future__ import annotations

from typing import Any

import click

from ftlaunch.servers.options import DEFAULT_HOST, DEFAULT_PORT, ServeOptions

AT_LEAST_ONE = click.IntRange(min=1)


@click.command()
@click.option(
    "--model",
    required=True,
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
    type=AT_LEAST_ONE,
    metavar="TOKENS",
    help="Prompt and answer together.  [default: what the model and the memory allow]",
)
@click.option(
    "--max-running-requests",
    type=AT_LEAST_ONE,
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
@click.option("--threads", type=AT_LEAST_ONE, metavar="N", help="CPU threads that compute.  [default: one a core]")
@click.option("--background", hidden=True, metavar="ID")
@click.option("--leased", hidden=True, is_flag=True)
def command(**options: Any) -> None:
    """Serve a model over HTTP until Ctrl-C.

    It answers the Anthropic Messages API (/v1/messages) and OpenAI's Chat Completions, Completions and Responses, and
    tells at /health how far loading is. Only programs on this machine can reach it, unless --host says otherwise.

    Everything chosen automatically is printed with its reason. `ft launch` starts servers by itself, in the background.
    """
    from ftlaunch.servers.serve import serve

    serve(ServeOptions(**options))
