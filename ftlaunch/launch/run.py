"""A launch from beginning to end."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ftengine.errors import FtError
from ftlaunch import paths
from ftlaunch.launch import child, files
from ftlaunch.launch.connect import connect
from ftlaunch.launch.fit import fitting
from ftlaunch.launch.install import folder, obtain
from ftlaunch.launch.request import LaunchRequest, Talk
from ftproviders import PROVIDERS, AgentPlan, Endpoint, LaunchOptions, Provider
from ftproviders.binaries import Program

INSIDE = "FT_LAUNCH_AGENT"  # set in the agent's environment


def launch(request: LaunchRequest, talk: Talk) -> int:
    """Returns the agent's exit status. Raises FtError for everything that keeps it from starting."""
    provider = PROVIDERS[request.agent]
    refuse_nested(request)
    paths.private(folder(provider))
    program = obtain(provider, request.environ, talk)
    with connect(request, talk) as endpoint:
        chosen = fitting(provider, endpoint.model, endpoint.context_window, options(request), talk.say)
        prepared = prepare(provider, program, endpoint, chosen, request)
        for note in prepared.notes:
            talk.say(note)
        with _alone(provider, prepared.plan.exclusive):
            files.write(prepared.plan)
            talk.say(f"{provider.title} with {endpoint.model} ({endpoint.context_window:,} tokens) at {endpoint.url}")
            return _run(provider, prepared.plan, request)


@dataclass(frozen=True)
class Prepared:
    plan: AgentPlan
    notes: tuple[str, ...]


def options(request: LaunchRequest) -> LaunchOptions:
    return LaunchOptions(
        user_args=request.user_args,
        lean=request.lean,
        isolated=request.isolated,
        interactive=request.interactive,
        strip_all=request.strip_all,
        directory=request.directory,
    )


def prepare(
    provider: Provider, program: Program, endpoint: Endpoint, chosen: LaunchOptions, request: LaunchRequest
) -> Prepared:
    plan = provider.plan(program.command, endpoint, chosen, folder(provider), request.environ)
    notes = list(plan.notes)
    if program.version is not None and not provider.npm.supports(program.version):
        notes.append(f"{provider.title} {program.version} is not a version we know; tested: {provider.npm.tested}")
    if chosen.lean and provider.lean_prompt is None:
        notes.append(f"{provider.title} has no lean form; --lean changes nothing")
    return Prepared(plan, tuple(notes))


def refuse_nested(request: LaunchRequest) -> None:
    """An agent inside an agent's terminal: two full-screen programs would fight over one keyboard."""
    around = request.environ.get(INSIDE)
    if around and request.interactive:
        raise FtError(
            f"this terminal already runs inside `ft launch {around}`",
            f"leave that agent first, or unset {INSIDE}",
        )


def _run(provider: Provider, plan: AgentPlan, request: LaunchRequest) -> int:
    environ = {**plan.child_environment(request.environ), INSIDE: provider.name}
    try:
        return child.run(plan.argv, environ, request.directory)
    except OSError as error:
        raise FtError(f"{plan.argv[0]} cannot be started: {error.strerror}", f"reinstall {provider.title}") from None


@contextlib.contextmanager
def _alone(provider: Provider, lock: Path | None) -> Iterator[None]:
    """Some agents bear only one process a state folder, and say so late and badly."""
    from ftengine.locks import try_lock

    if lock is None:
        yield
        return
    paths.private(lock.parent)
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not try_lock(fd):
            raise FtError(
                f"{provider.title} is running already, and only one at a time can use its state folder",
                "leave the other one first",
            )
        yield
    finally:
        os.close(fd)
