"""From a request to an endpoint that answers, and the lease that keeps its server alive."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ftengine.errors import FtError
from ftlaunch.launch import budgets, remote
from ftlaunch.launch.choose import model_name
from ftlaunch.launch.request import LaunchRequest, Talk
from ftlaunch.servers import ServerLeaving
from ftproviders import Endpoint

if TYPE_CHECKING:
    from ftlaunch.servers import ServerRecord

NO_KEY = "local"  # some agents insist on a key; a server without one ignores it
ATTEMPTS = 3  # a server that others share may end between being found and being joined
LARGEST_ANSWER = 32_000  # tokens


@contextlib.contextmanager
def connect(request: LaunchRequest, talk: Talk) -> Iterator[Endpoint]:
    """A loaded model, for as long as the block runs. Raises FtError when there is none."""
    if request.server is not None:
        yield _elsewhere(request, request.server, talk)
        return
    model = model_name(request.model, talk)
    with contextlib.ExitStack() as held:
        record, health = _ready(model, request, talk, held)
        context = int(health["context_length"])
        if request.context is not None and context < request.context:
            raise FtError(
                f"{record.served_name} runs with {context:,} tokens of context, --context asks for {request.context:,}",
                f"ft stop {record.port}, then launch again",
            )
        budgets.check(request, record, talk)
        yield local_endpoint(record, health)


def local_endpoint(record: ServerRecord, health: dict[str, Any]) -> Endpoint:
    return Endpoint(
        url=record.url,
        model=record.served_name,
        context_window=int(health["context_length"]),
        max_output_tokens=output_limit(int(health["context_length"]), health.get("max_output_tokens")),
        api_key=record.api_key or NO_KEY,
    )


def output_limit(context: int, stated: object) -> int:
    """Tokens of one answer: what the server states, else a quarter of the window, at most 32,000."""
    return int(stated) if isinstance(stated, int) and stated > 0 else min(max(context // 4, 1), LARGEST_ANSWER)


def _ready(
    model: str, request: LaunchRequest, talk: Talk, held: contextlib.ExitStack
) -> tuple[ServerRecord, dict[str, Any]]:
    """A server of `model`, joined until `held` closes, and loaded."""
    from ftlaunch.servers import find, join, wait_ready

    for _ in range(ATTEMPTS):
        shared = find(model)
        with contextlib.ExitStack() as starting, contextlib.suppress(ServerLeaving):
            record = shared or _start(model, request, talk, starting)
            held.enter_context(join(record))
            break
    else:
        raise FtError(f"the server of {model} ends again and again", "ft ps, and look at its log")
    if request.keep and shared is not None and record.lease_dir is not None:
        talk.say(f"The server of {record.served_name} was started by another launch: it ends with the last of them")
    with talk.progress() as show:
        return record, wait_ready(record, show)


def _start(model: str, request: LaunchRequest, talk: Talk, hold: contextlib.ExitStack) -> ServerRecord:
    from ftlaunch.servers import start_background

    talk.say(f"Starting a server of {model}")
    record = start_background(
        model,
        context=request.context,
        cache_device=request.cache_device,
        cache_host=request.cache_host,
        cache_disk=request.cache_disk,
        leased=not request.keep,
        hold=hold,
        on_message=talk.say,
    )
    if record.log is not None:
        talk.say(f"Its log: {record.log}")
    return record


def _elsewhere(request: LaunchRequest, server: str, talk: Talk) -> Endpoint:
    url = remote.base_url(server)
    api_key = request.environ.get("FT_API_KEY") or None
    budgets.unused(request, url, talk)
    with talk.progress() as show:
        remote.wait_loaded(url, api_key, show)
    entry = remote.model_entry(url, api_key, request.model)
    return remote_endpoint(url, api_key, entry, request.context)


def remote_endpoint(url: str, api_key: str | None, entry: dict[str, Any], context: int | None) -> Endpoint:
    stated = entry.get("context_length") or entry.get("max_model_len")
    window = min(context, stated) if context and isinstance(stated, int) else context or stated
    if not isinstance(window, int):
        raise FtError(f"the server at {url} does not say how much context {entry['id']} has", "state it with --context")
    return Endpoint(
        url=url,
        model=str(entry["id"]),
        context_window=window,
        max_output_tokens=output_limit(window, entry.get("max_output_tokens")),
        api_key=api_key or NO_KEY,
    )
