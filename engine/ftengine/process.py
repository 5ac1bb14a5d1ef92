"""The engine process: `python -m ftengine.process --fd N --config JSON`, started by the front.

It speaks frames (ftengine.wire) over the socket N: Loading until Ready or Fatal, then Output and Failed. It ends when
the socket does, on Shutdown, after Fatal when its device is lost, and at once on SIGTERM; Ctrl-C is the front's to
handle. Nothing it holds needs saving, so an end that a long computation would hold up is forced after a moment. torch
is imported after the first frame.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import time

from ftengine.config import EngineConfig
from ftengine.errors import FtError
from ftengine.scheduler.channel import Channel, FrontGone
from ftengine.wire import Fatal, Loading

GRACE_SECONDS = 0.3  # for the step or the loading that runs when the end comes
PROGRESS_SECONDS = 0.05  # least time between two Loading frames of one stage

LOG_FORMAT, LOG_TIME = "%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S"  # as the front's: both fill one log

log = logging.getLogger("ftengine")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ftengine.process", description="the engine process of ft serve")
    parser.add_argument("--fd", type=int, required=True, help="an inherited end of a Unix socketpair")
    parser.add_argument("--config", required=True, help="an EngineConfig as JSON")
    options = parser.parse_args(arguments)
    # Read once, when torch is imported. OpenMP's threads spin while they wait for each other; on cores that somebody
    # else uses too, each wait then costs time slices: prefill fell to a tenth.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the kernel's way out works in the middle of any computation
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, datefmt=LOG_TIME, stream=sys.stderr)
    channel = Channel(socket.socket(fileno=options.fd), on_end=_end_soon)
    try:
        channel.send([Loading("starting the engine", 0.0)])
        channel.start()
        return run(options.config, channel)
    except FrontGone:
        return 0


def run(config_json: str, channel: Channel) -> int:
    """Exit status: 0 after serving, 1 if the engine could not start or go on. Raises FrontGone."""
    try:
        config = EngineConfig.from_json(config_json)
        from ftengine.scheduler.start import start

        engine, ready = start(config, _Progress(channel))
    except FrontGone:
        raise
    except Exception as error:
        if os.environ.get("FT_DEBUG"):
            log.error("the engine cannot start", exc_info=error)
        channel.send([describe(error)])  # the front says it
        return 1
    channel.send([ready])
    from ftengine.scheduler.loop import serve

    try:
        lost = serve(engine, channel, config.log_seconds) is not None
    except FrontGone:
        raise
    except Exception as error:
        log.error("the engine cannot go on", exc_info=error)
        lost = True
    if lost:
        # At once: on a device that is lost, everything that is tidied up at an ordinary exit would wait or fail.
        logging.shutdown()
        os._exit(1)
    return 0


def describe(error: Exception) -> Fatal:
    """One sentence for a person, and what may help."""
    if isinstance(error, FtError):
        return Fatal(str(error), error.next_step)
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return Fatal(f"the engine ran out of memory while starting: {error}", "ft serve --context 8192")
    return Fatal(f"the engine could not start: {type(error).__name__}: {error}", "FT_DEBUG=1 ft serve")


class _Progress:
    """Sends Loading frames, not more than the front can show."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._stage = ""
        self._sent = 0.0

    def __call__(self, stage: str, done: float) -> None:
        now = time.monotonic()
        if stage != self._stage or now - self._sent >= PROGRESS_SECONDS:
            self._channel.send([Loading(stage, min(max(done, 0.0), 1.0))])
            self._stage, self._sent = stage, now


def _end_soon() -> None:
    """Runs in the reading thread once the front is gone: the main thread may be in the middle of a long call."""
    time.sleep(GRACE_SECONDS)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
