"""Being a server: from options to the running front, with a record that others find it by."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from ftengine.errors import FtError
from ftlaunch import paths
from ftlaunch.servers import ports
from ftlaunch.servers.lost import holder
from ftlaunch.servers.options import ServeOptions
from ftlaunch.servers.publish import publish
from ftlaunch.servers.record import ServerRecord
from ftlaunch.servers.registry import log_path, port_path
from ftlaunch.servers.start import new_id

if TYPE_CHECKING:
    from pathlib import Path

    from ftengine.api.settings import ServeSettings
    from ftengine.config import EngineConfig

ENGINE_OPTIONS = (  # that the engine's configuration has under the same names
    "dtype",
    "device",
    "context",
    "max_running_requests",
    "kv_tokens",
    "threads",
    "memory_ratio",
    "cache_device",
    "cache_host",
    "cache_disk",
    "moe_backend",
    "moe_cache_size",
    "moe_cache_rate",
    "moe_cache_mem",
    "moe_cpu_threads",
)


def serve(options: ServeOptions) -> None:
    """Serve until stopped. Raises FtError when it cannot start."""
    from ftlaunch.store import resolve, used
    from ftlaunch.store.filenames import check_path

    if options.served_model_name is not None and not options.served_model_name.strip():
        raise FtError("the served model name is blank", "ft serve --served-model-name NAME, or leave it out")
    model_dir = resolve(options.model)
    check_path(model_dir, "mv the model to a folder with another name")
    record = _record(options, model_dir, _port(options))
    settings = _settings(options, record, model_dir)
    _check(settings.engine)
    from ftengine.api import server

    used.record(record.model)
    # Without a record others do not find the server, and one in the background is of no use then.
    with publish(record, needed=options.background is not None) as look:
        server.run(settings, at_end=partial(_remember, record), look=look)


def engine_config(options: ServeOptions, model_dir: Path) -> EngineConfig:
    """What these options ask of the engine. Raises ConfigError for what is impossible."""
    from ftengine.config import EngineConfig
    from ftlaunch.store import canonical

    return EngineConfig(
        model_dir=str(model_dir),
        model_name=canonical(options.model),
        prefill_chunk=options.max_prefill_length,
        cache_dir=str(paths.prompts()),
        **{name: getattr(options, name) for name in ENGINE_OPTIONS},
    )


def _check(config: EngineConfig) -> None:
    """What the engine would refuse, as far as it can be told before it is started. Raises ConfigError."""
    from ftengine import switches
    from ftengine.memory.gpu import refuse_at_once
    from ftlaunch.servers.check import check_headers

    switches.check()
    refuse_at_once(config)
    check_headers(config)


def _remember(record: ServerRecord, stats: dict[str, Any]) -> None:
    """Beside what was predicted, for the next prediction."""
    from ftlaunch.machine.remember import remember

    remember(record, stats)


def _port(options: ServeOptions) -> int:
    """The port to ask for. Raises FtError for one that is held; in the background any free one is taken instead, and
    that is left to the server: between a look here and its start another one may take the port."""
    if options.background is not None:
        return options.port
    try:
        if options.port == 0 or ports.is_free(options.host, options.port):
            return options.port
    except OSError as error:
        reason = f"this machine cannot listen on {options.host}: {error.strerror}"
        raise FtError(reason, f"ft serve --model {options.model} --host 127.0.0.1") from error
    raise FtError(
        f"port {options.port} is held by {holder(options.port)}",
        f"ft ps, or ft serve --model {options.model} --port {_free_port(options)}",
    )


def _free_port(options: ServeOptions) -> int:
    """The next one above, as a suggestion; 0 when there is none near."""
    near = range(options.port + 1, min(options.port + 100, 65536))
    return next((port for port in near if ports.is_free(options.host, port)), 0)


def _record(options: ServeOptions, model_dir: Path, port: int) -> ServerRecord:
    from ftlaunch.store import canonical

    server_id = options.background or new_id()
    return ServerRecord(
        id=server_id,
        pid=os.getpid(),
        host=options.host,
        port=port,
        model=canonical(options.model),
        served_name=options.served_model_name or _served_name(options.model, model_dir),
        log=log_path(server_id) if options.background else None,
        started=time.time(),
        api_key=options.api_key,
        lease_dir=paths.leases(server_id) if options.leased else None,
    )


def _served_name(model: str, path: Path) -> str:
    """The model's name without its revision; of a path the last part, of a file without its ending."""
    from ftlaunch.store.names import canonical, looks_like_path

    if looks_like_path(model):
        return path.stem if path.is_file() else path.name
    return canonical(model).partition("@")[0]


def _settings(options: ServeOptions, record: ServerRecord, model_dir: Path) -> ServeSettings:
    from ftengine.api.settings import ServeSettings

    return ServeSettings(
        model_dir=str(model_dir),
        served_name=record.served_name,
        engine=engine_config(options, model_dir),
        host=record.host,
        port=record.port,
        other_port=options.background is not None,
        api_key=record.api_key,
        max_output_tokens=options.max_output_tokens,
        lease_dir=None if record.lease_dir is None else str(record.lease_dir),
        announce=str(port_path(record.id)),
    )
