"""The engine's end of the socketpair: frames in through a thread, frames out from the step loop.

The thread is why the end of the front is noticed at once, whatever the step loop is busy with.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Iterable

import msgspec

from ftengine.wire import HEADER, MAX_FRAME, Shutdown, ToEngine, ToFront, decode_to_engine, encode


class FrontGone(Exception):
    """The other end of the socket is closed."""


class _Wake:
    """Stands in the inbox for no message."""


_WAKE = _Wake()


class Channel:
    def __init__(self, connection: socket.socket, on_end: Callable[[], None] = lambda: None) -> None:
        """on_end: called in the reading thread when the front is gone or asked for the end, after that was queued."""
        self._connection = connection
        self._on_end = on_end
        self._inbox: queue.SimpleQueue[ToEngine | _Wake | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, name="frames", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def receive(self, *, wait: bool) -> list[ToEngine | None]:
        """What has arrived; with `wait`, at least one, unless `wake` came first. None: the end of the front."""
        found = [self._inbox.get()] if wait else []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._inbox.get_nowait())
        return [message for message in found if not isinstance(message, _Wake)]

    def wake(self) -> None:
        """Ends a wait in `receive`, with no message. From any thread."""
        self._inbox.put(_WAKE)

    def send(self, messages: Iterable[ToFront]) -> None:
        """All in one write. Raises FrontGone."""
        frames = b"".join(encode(message) for message in messages)
        try:
            self._connection.sendall(frames)
        except OSError as error:
            raise FrontGone from error

    def _read(self) -> None:
        with self._connection.makefile("rb") as stream:
            while True:
                try:
                    message = _read_frame(stream.read)
                except (OSError, EOFError, ValueError, msgspec.MsgspecError):
                    message = None
                self._inbox.put(message)
                if message is None or isinstance(message, Shutdown):
                    self._on_end()
                    return


def _read_frame(read: Callable[[int], bytes]) -> ToEngine:
    """Raises EOFError at the end, also within a frame; ValueError for a frame over the limit."""
    header = read(HEADER.size)
    if len(header) < HEADER.size:
        raise EOFError
    (length,) = HEADER.unpack(header)
    if length > MAX_FRAME:
        raise ValueError(f"a frame of {length} bytes is over the limit of {MAX_FRAME}")
    body = read(length)
    if len(body) < length:
        raise EOFError
    return decode_to_engine(body)
