"""The engine process: `python -m ftengine.process --fd N --config JSON`, started by the front.

It speaks frames (ftengine.wire) over the socket N: Loading until Ready or Fatal, then Output and Failed. It ends when
the socket does, on Shutdown, on SIGTERM, and after Fatal when its device is lost; Ctrl-C is the front's to handle. What
prompts are still to be written to the disk is written for a moment; an end that a long computation would hold up is
forced. torch is imported after the first frame.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

from ftengine.config import EngineConfig
from ftengine.scheduler.channel import Channel, FrontGone
from ftengine.scheduler.fatal import describe
from ftengine.wire import Loading

GRACE_SECONDS = 0.3  # for the step or the loading that runs when the end comes
SAVE_SECONDS = 2.0  # for writing prompts; the front waits longer (api/engine_process.py)
TERMINATED = 128 + signal.SIGTERM  # exit status, as a shell gives it
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
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, datefmt=LOG_TIME, stream=sys.stderr)
    gc.disable()  # until the loop begins: next to nothing that a start makes becomes garbage, and looking took 0.3 s
    connection = socket.socket(fileno=options.fd)
    end = _End(connection)
    channel = Channel(connection, on_end=end.soon)
    with contextlib.suppress(FrontGone):
        channel.send([Loading("starting the engine", 0.0)])
        channel.start()
        return run(options.config, channel, end)
    return end.come()


def run(config_json: str, channel: Channel, end: _End) -> int:
    """Exit status: 0 after serving, 1 if the engine could not start or go on. Raises FrontGone."""
    try:
        config = EngineConfig.from_json(config_json)
        from ftengine.scheduler.start import start

        engine, ready = start(config, _Progress(channel), channel.wake)
        from ftengine.scheduler.loop import serve, settle  # not before: it imports torch

        settle()
    except FrontGone:
        raise
    except Exception as error:
        if os.environ.get("FT_DEBUG"):
            log.error("the engine cannot start", exc_info=error)
        channel.send([describe(error)])  # the front says it
        return 1
    channel.send([ready])
    end.save = engine.close
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
    return end.come()


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


class _End:
    """The end in bounded time, whatever the threads are doing.

    save: what is to be saved before, given the seconds that it may take; called once, perhaps while a step computes.
    status: exit status.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.save: Callable[[float], None] | None = None
        self.status = 0
        self._connection = connection
        self._computed = threading.Event()  # the step loop was left
        self._saving = threading.Lock()
        # The handler proper runs between two instructions of the main thread, which may be in the middle of a long
        # computation; the byte is written at once.
        signals, wakeup = socket.socketpair()
        wakeup.setblocking(False)
        signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda *_: None)
        threading.Thread(target=self._on_signal, args=(signals, wakeup), name="signals", daemon=True).start()

    def soon(self) -> None:
        """Runs in the reading thread once the front is gone or asked for the end."""
        try:
            self._computed.wait(GRACE_SECONDS)
            self._saved()
            time.sleep(GRACE_SECONDS)
        finally:
            os._exit(self.status)

    def come(self) -> int:
        """Runs in the main thread when the step loop is over. Returns the exit status."""
        self._computed.set()
        self._saved()
        return self.status

    def _saved(self) -> None:
        with self._saving:
            save, self.save = self.save, None
            if save is not None:
                save(SAVE_SECONDS)

    def _on_signal(self, signals: socket.socket, _: socket.socket) -> None:
        """The second socket is kept open. As if the front were gone: there is one way out."""
        while signals.recv(1)[0] != signal.SIGTERM:
            pass
        self.status = TERMINATED
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    sys.exit(main())
