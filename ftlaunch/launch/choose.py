"""Which model a launch uses when it may have to start a server: named, running, in the store, or the demo."""

from __future__ import annotations

from ftengine.errors import FtError
from ftlaunch.launch.request import Talk

FIRST_MODEL = "demo"


def model_name(named: str | None, talk: Talk) -> str:
    """The model that is asked for, else the running server's, else the newest in the store, else the demo.

    What the store lacks but can fetch is pulled after asking. Raises FtError when there is no such model.
    """
    from ftlaunch.servers import find

    name = default_model() if named is None else named
    if find(name) is None:
        _have(name, talk)
    return name


def default_model() -> str:
    """What a launch without --model means now."""
    from ftlaunch.servers import find
    from ftlaunch.store.listing import installed

    running = find(None)
    if running is not None:
        return running.model
    models = sorted(installed(), key=lambda model: model.path.stat().st_mtime)
    return models[-1].name if models else FIRST_MODEL


def _have(name: str, talk: Talk) -> None:
    from ftlaunch.store import resolve

    try:
        resolve(name)
    except FtError as error:
        if not can_be_fetched(name):
            raise
        if not talk.confirm(f"{str(error)[:1].upper()}{str(error)[1:]}. Fetch it?"):
            raise FtError(str(error), f"ft pull {name}, or the same command with --yes") from None
        from ftlaunch.store.pull import Wishes, pull

        with talk.progress() as show:
            pull(name, on_progress=show, on_message=talk.say, wishes=Wishes(confirm=talk.confirm))


def can_be_fetched(name: str) -> bool:
    """Whether `ft pull` knows a source for the name: the catalogue, in any case, or a repository of the Hub."""
    from ftlaunch.store.catalogue import short_name
    from ftlaunch.store.names import hub_name, looks_like_path

    return not looks_like_path(name) and (short_name(name) is not None or hub_name(name) is not None)


def context_on_disk(name: str) -> int | None:
    """Tokens of context that the model was made for; None when its files do not say."""
    from ftengine.weights.checkpoint import Checkpoint
    from ftlaunch.store import resolve

    try:
        return Checkpoint.open(resolve(name)).max_context
    except FtError:
        return None
