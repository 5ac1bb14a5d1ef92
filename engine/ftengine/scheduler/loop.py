"""The engine's one loop: take frames, do a step, send what came of it."""

from __future__ import annotations

import logging

from ftengine.scheduler.channel import Channel
from ftengine.scheduler.engine import Engine
from ftengine.scheduler.stats import WorkLog
from ftengine.wire import AskStats, Cancel, Shutdown, Stats, Submit, ToEngine, ToFront

log = logging.getLogger(__name__)


def serve(engine: Engine, channel: Channel, log_seconds: float) -> None:
    """Returns when the front is gone or sends Shutdown. Sleeps while there is nothing to compute. Raises FrontGone."""
    work_log = WorkLog(engine.counters, engine.scheduler, log_seconds)
    while True:
        idle = not engine.has_work
        if idle:
            check(engine)
        messages = channel.receive(wait=idle)
        if idle:
            work_log.idle()
        events: list[ToFront] = []
        for message in messages:
            if message is None or isinstance(message, Shutdown):
                return
            events += handle(engine, message)
        events += engine.admit()
        if events:
            channel.send(events)
        if engine.has_work and (produced := engine.step()):
            channel.send(produced)
        line = work_log.line()
        if line:
            log.info(line)


def handle(engine: Engine, message: ToEngine) -> list[ToFront]:
    if isinstance(message, Submit):
        return [*engine.submit(message.request)]
    if isinstance(message, Cancel):
        return [*engine.cancel(message.id)]
    if isinstance(message, AskStats):
        return [Stats(engine.stats())]
    return []


def check(engine: Engine) -> None:
    """With nothing running every page and slot is free or cached. A leak costs memory, not answers: it is logged."""
    try:
        engine.scheduler.check_idle()
    except AssertionError as error:
        log.error("the cache's books are wrong: %s", error)
