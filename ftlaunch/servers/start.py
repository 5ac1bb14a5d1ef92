"""Starting a server in the background."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from ftengine.errors import FtError
from ftengine.locks import locked
from ftlaunch import paths
from ftlaunch.servers.key import shared_key
from ftlaunch.servers.lost import holder
from ftlaunch.servers.options import DEFAULT_PORT, ServeOptions
from ftlaunch.servers.record import ServerRecord
from ftlaunch.servers.registry import find, log_path, running

LISTEN_SECONDS = 60.0  # from the start of the process to its listening port; usually half a second
LOGS_KEPT = 20


def start_background(
    model: str,
    *,
    context: int | None = None,
    max_output_tokens: int | None = None,
    max_running_requests: int | None = None,
    cache_device: int | None = None,
    cache_host: int | None = None,
    cache_disk: int | None = None,
    served_model_name: str | None = None,
    port: int | None = None,
    leased: bool = True,
    hold: ExitStack | None = None,
    on_message: Callable[[str], None] = lambda text: None,
) -> ServerRecord:
    """A server of `model` that listens: the one that runs already, else a new one in a session of its own.

    Any number of processes may call this at once; one server results. It returns as soon as the server listens,
    before the model is loaded (`wait_ready`). `port` None: 1919, or a free one when that is held by another program
    (`on_message` says so). `leased`: the server ends by itself when its last lease is gone. `hold` gets a lease that is
    taken before a process is started, so that a caller who is interrupted before it can join leaves no server behind.

    Raises FtError when there is no such model, and, with the end of the server's log, when it does not start.
    """
    from ftengine.leases import acquire
    from ftlaunch.store import canonical, resolve

    resolve(model)
    waiting = f"Waiting for another ft that starts a server of {model}"
    with locked(paths.run() / "start.lock", lambda: on_message(waiting)):
        existing = find(model)
        if existing is not None:
            return existing
        server_id = new_id()
        options = ServeOptions(
            model=canonical(model),
            port=DEFAULT_PORT if port is None else port,
            served_model_name=served_model_name,
            context=context,
            max_output_tokens=max_output_tokens,
            max_running_requests=max_running_requests,
            cache_device=cache_device,
            cache_host=cache_host,
            cache_disk=cache_disk,
            background=server_id,
            leased=leased,
        )
        if leased and hold is not None:
            hold.enter_context(acquire(paths.leases(server_id)))
        record = _start(options)
    if record.port != options.port and options.port != 0:
        on_message(f"Port {options.port} is held by {holder(options.port)}; the server listens on {record.port}")
    return record


def start_own(options: ServeOptions, hold: ExitStack) -> ServerRecord:
    """Another server, whatever runs already, that listens.

    It ends by itself when `hold` is closed or this process ends. Raises FtError as `start_background` does.
    """
    from ftengine.leases import acquire
    from ftlaunch.store import resolve

    resolve(options.model)
    with locked(paths.run() / "start.lock"):
        server_id = new_id()
        hold.enter_context(acquire(paths.leases(server_id)))
        return _start(replace(options, background=server_id, leased=True))


def new_id() -> str:
    return secrets.token_hex(6)


def _start(options: ServeOptions) -> ServerRecord:
    assert options.background is not None
    log = log_path(options.background)
    paths.private(log.parent)
    _remove_old_logs(log.parent)
    _remove_old_leases(paths.leases(options.background).parent)
    process = _spawn(options, log)
    deadline = time.monotonic() + LISTEN_SECONDS
    while time.monotonic() < deadline:
        for record in running():
            if record.id == options.background:
                return record
        if process.poll() is not None:
            raise _died(options.model, log)
        time.sleep(0.05)
    process.terminate()
    raise FtError(f"the server of {options.model} did not listen within {LISTEN_SECONDS:.0f} s", f"see its log: {log}")


def _spawn(options: ServeOptions, log: Path) -> subprocess.Popen[bytes]:
    """In its own session, so that neither a closed terminal nor a Ctrl-C meant for the agent reaches it, and in our own
    folder, where no file of the user's working directory can be imported. The key travels in the environment, which
    only its owner can read.
    """
    environment = {**os.environ, "FT_API_KEY": shared_key(), "PYTHONSAFEPATH": "1"}
    if environment.get("FT_HOME"):  # where it is not set it stays so: the default has its cache elsewhere
        environment["FT_HOME"] = str(paths.home())
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "ftlaunch", "serve", *options.arguments()],
            stdin=subprocess.DEVNULL,
            stdout=fd,
            stderr=fd,
            cwd=paths.private(paths.run()),
            env=environment,
            start_new_session=True,
        )
    finally:
        os.close(fd)
    # It may outlive this process or end before: then somebody has to take note, or it stays as a zombie.
    threading.Thread(target=process.wait, name="reap-server", daemon=True).start()
    return process


def _died(model: str, log: Path) -> FtError:
    """What the server said last: its own error and next step when it gave one."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    said = [line.removeprefix("Error: ") for line in lines if line.startswith("Error: ")]
    step = [line.removeprefix("Try:").strip() for line in lines if line.startswith("Try:")]
    reason = (said or lines or ["it said nothing"])[-1]
    return FtError(
        f"the server of {model} did not start: {reason}", step[-1] if said and step else f"see its log: {log}"
    )


def _remove_old_logs(directory: Path) -> None:
    """Keep the newest, and those of servers that run."""
    used = {record.log for record in running()}
    logs = sorted(directory.glob("*.log"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in logs[LOGS_KEPT:]:
        if path not in used:
            path.unlink(missing_ok=True)


def _remove_old_leases(directory: Path) -> None:
    """The folders of servers that ended. One in which somebody still holds a lease, as for a start, stays."""
    from ftengine.leases import held

    used = {record.lease_dir for record in running()}
    for folder in directory.glob("*"):
        if folder not in used and not held(folder):
            with suppress(OSError):
                folder.rmdir()
