"""The engine's one loop: take frames, do a step, send what came of it."""

from __future__ import annotations

import gc
import logging

from ftengine.scheduler.channel import Channel
from ftengine.scheduler.engine import Engine
from ftengine.scheduler.stats import WorkLog
from ftengine.scheduler.tracing import Tracing
from ftengine.wire import AskStats, Cancel, Fatal, Shutdown, Stats, StopTrace, Submit, ToEngine, ToFront, Trace

log = logging.getLogger(__name__)


def settle() -> None:
    """The end of a start, for the collector of garbage. Before readiness is told: no request is taken meanwhile."""
    gc.collect()
    gc.freeze()  # what start left lives on; to look through it again would hold up a step for a tenth of a second
    gc.enable()


def serve(engine: Engine, channel: Channel, log_seconds: float) -> Fatal | None:
    """Returns when the front is gone or sends Shutdown: None. Returns why when only a new process can go on computing;
    the front has been told of the requests then. Sleeps while there is nothing to compute; a transfer of the prompt
    cache that ends meanwhile wakes the channel. Raises FrontGone.

    What a step gave is sent while the next one computes on the device. On the CPU nothing computes until `finish`.
    """
    work_log = WorkLog(engine.counters, engine.scheduler, log_seconds, engine.expert_stats)
    tracing = Tracing(engine.model)
    events: list[ToFront] = []
    while True:
        idle = not engine.has_work
        if idle:
            if events:
                channel.send(events)
                events = []
                gc.collect()  # now, so that it is seldom due in the middle of work
            check(engine)
            work_log.pause()
            engine.rest(True)
        messages = channel.receive(wait=idle or engine.stalled)
        if idle:
            engine.rest(False)
            work_log.go_on()
        for message in messages:
            if message is None or isinstance(message, Shutdown):
                return None
            events += tracing.take(message) if isinstance(message, Trace | StopTrace) else handle(engine, message)
        events += engine.admit()
        work_log.admitted()
        engine.begin()
        if events:
            channel.send(events)
        events = [*engine.finish()]
        if engine.lost is not None:
            channel.send([*events, engine.lost])
            return engine.lost
        events += tracing.advance()
        line = work_log.line()
        if line:
            log.info(line)


def handle(engine: Engine, message: ToEngine) -> list[ToFront]:
    if isinstance(message, Submit):
        return [*engine.submit(message.request)]
    if isinstance(message, Cancel):
        return [*engine.cancel(message.id)]
    if isinstance(message, AskStats):
        return [Stats(engine.stats(layers=message.layers))]
    return []


def check(engine: Engine) -> None:
    """With nothing running every page and slot is free or cached. A leak costs memory, not answers: it is logged."""
    try:
        engine.scheduler.check_idle()
    except AssertionError as error:
        log.error("the cache's books are wrong: %s", error)
