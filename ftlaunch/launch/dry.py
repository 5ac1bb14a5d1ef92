"""`--dry-run`: the plan of a launch, found out without writing a file or starting anything."""

from __future__ import annotations

from typing import Any

from ftengine.errors import FtError
from ftengine.memory import plan, vram
from ftengine.memory.gpu import may_be_there
from ftlaunch.launch import preview, remote
from ftlaunch.launch.choose import can_be_fetched, context_on_disk, default_model
from ftlaunch.launch.connect import NO_KEY, local_endpoint, output_limit, remote_endpoint
from ftlaunch.launch.fit import fitting
from ftlaunch.launch.install import folder
from ftlaunch.launch.request import LaunchRequest
from ftlaunch.launch.run import options, prepare, refuse_nested
from ftproviders import PROVIDERS, Endpoint, binaries

FUTURE_KEY = "(made when the server starts)"
UNKNOWN_CONTEXT = 32_768  # tokens; shown with a note for a model that is not here yet


def dry_run(request: LaunchRequest) -> dict[str, Any]:
    """The plan as data, secrets masked. Raises FtError where the launch would refuse."""
    provider = PROVIDERS[request.agent]
    refuse_nested(request)
    notes: list[str] = []
    endpoint = _endpoint(request, notes)
    program = binaries.locate(provider, folder(provider), request.environ)
    if program.missing:
        into = binaries.prefix(folder(provider))
        notes.append(f"Would install first: {' '.join(binaries.npm_command('npm', into, program.missing))}")
    chosen = fitting(provider, endpoint.model, endpoint.context_window, options(request), notes.append)
    prepared = prepare(provider, program, endpoint, chosen, request)
    secrets = [] if endpoint.api_key in (NO_KEY, FUTURE_KEY) else [endpoint.api_key]
    return preview.as_data(
        prepared.plan, secrets, [*notes, *(n for n in prepared.notes if n not in prepared.plan.notes)]
    )


def _endpoint(request: LaunchRequest, notes: list[str]) -> Endpoint:
    from ftlaunch.servers import find, health

    if request.server is not None:
        url = remote.base_url(request.server)
        api_key = request.environ.get("FT_API_KEY") or None
        return remote_endpoint(url, api_key, remote.model_entry(url, api_key, request.model), request.context)
    model = default_model() if request.model is None else request.model
    record = find(model)
    answer = health(record) if record is not None else None
    if record is not None and answer is not None and answer.get("context_length"):
        return local_endpoint(record, answer)
    return _future(model, request, notes)


def _default_context(model: str, notes: list[str]) -> int:
    """Tokens: at most those that the server takes by default, which may be fewer where there is little memory."""
    found = context_on_disk(model)
    if found is None:
        notes.append(f"The context of {model} is not known yet; {UNKNOWN_CONTEXT:,} tokens are shown")
        return UNKNOWN_CONTEXT
    context = min(found, vram.DEFAULT_CONTEXT if may_be_there() else plan.DEFAULT_CONTEXT)
    notes.append(f"The server decides on its context when it starts; {context:,} tokens are shown")
    return context


def _future(model: str, request: LaunchRequest, notes: list[str]) -> Endpoint:
    """What the server will be that a real launch would start."""
    from ftlaunch.servers.options import DEFAULT_HOST, DEFAULT_PORT
    from ftlaunch.store import canonical, resolve

    try:
        resolve(model)
    except FtError:
        if not can_be_fetched(model):
            raise
        notes.append(f"Would fetch the model first: ft pull {model}")
    notes.append(f"Would start a server of {model}; its port and key are chosen then")
    context = request.context or _default_context(model, notes)
    name = canonical(model).rstrip("/").rpartition("/")[2]
    return Endpoint(f"http://{DEFAULT_HOST}:{DEFAULT_PORT}", name, context, output_limit(context, None), FUTURE_KEY)
