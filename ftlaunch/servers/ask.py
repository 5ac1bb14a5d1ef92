"""Questions to a server: over loopback and never through a proxy."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
from typing import TYPE_CHECKING, Any

from ftlaunch.servers.record import ServerRecord

if TYPE_CHECKING:
    import http.client

MOST_BYTES = 8 << 20
MOST_ANSWER = 256 << 20
HEALTH_SECONDS = 10.0


def ask(record: ServerRecord, path: str, timeout: float = 2.0) -> dict[str, Any] | None:
    """The JSON object that `GET path` gives (docs/api.md), or None when there is none. `timeout`: seconds for all of it
    and not only between two bytes, for anything may listen on the port of a server that ended.
    """
    import http.client
    import threading

    try:
        connection, headers = _connection(record, timeout)
    except ValueError:
        return None
    deadline = threading.Timer(timeout, _end, [connection])
    deadline.daemon = True
    deadline.start()
    try:
        connection.request("GET", path, headers=headers)
        body = json.loads(connection.getresponse().read(MOST_BYTES))
    except (OSError, http.client.HTTPException, ValueError, RecursionError):
        return None
    finally:
        deadline.cancel()
        connection.close()
    return body if isinstance(body, dict) else None


def _connection(record: ServerRecord, timeout: float) -> tuple[http.client.HTTPConnection, dict[str, str]]:
    """And the headers of each request. Nothing is sent yet. Raises ValueError for a host that none can have."""
    import http.client
    from urllib.parse import urlsplit

    target = urlsplit(record.url)
    headers = {"Authorization": f"Bearer {record.api_key}"} if record.api_key else {}
    return http.client.HTTPConnection(target.hostname or "", target.port, timeout=timeout), headers


def _end(connection: http.client.HTTPConnection) -> None:
    """Reading goes on as at the end of the stream."""
    with contextlib.suppress(OSError):
        if connection.sock is not None:
            connection.sock.shutdown(socket.SHUT_RDWR)


def fetch(record: ServerRecord, path: str, body: dict[str, Any], next_step: str, patience: float = 60.0) -> bytes:
    """What `POST path` answers with 200.

    The answer may take as long as it needs while the server tells its health, which it is asked every `patience`
    seconds. Once it begins, all of it, at most MOST_ANSWER bytes, has to come within `patience` seconds.

    Raises FtError with what the server says else, and with `next_step`.
    """
    import http.client

    from ftengine.errors import FtError

    try:
        connection, headers = _connection(record, patience)
    except ValueError:
        raise FtError(f"the server of {record.served_name} has no address: {record.url}", next_step) from None
    try:
        connection.request("POST", path, json.dumps(body), {**headers, "Content-Type": "application/json"})
        while not _readable(connection, patience):
            if ask(record, "/health", min(patience, HEALTH_SECONDS)) is None:
                raise TimeoutError
        status, answer = _answer(connection, patience)
    except (OSError, http.client.HTTPException) as error:
        how = f"has stalled for {patience:.0f} seconds" if isinstance(error, TimeoutError) else "does not answer"
        raise FtError(f"the server of {record.served_name} at {record.url} {how}", next_step) from error
    finally:
        connection.close()
    if len(answer) > MOST_ANSWER:
        raise FtError(f"the server's answer is longer than {MOST_ANSWER >> 20} MiB", next_step)
    if status != 200:
        raise FtError(error_message(answer) or f"the server answered with status {status}", next_step)
    return answer


def _readable(connection: http.client.HTTPConnection, seconds: float) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(connection.sock, selectors.EVENT_READ)
        return bool(selector.select(seconds))


def _answer(connection: http.client.HTTPConnection, seconds: float) -> tuple[int, bytes]:
    """Status and body, cut a byte after MOST_ANSWER. Raises TimeoutError, HTTPException and OSError."""
    import http.client
    import threading

    late = threading.Event()
    sock = connection.sock

    def end() -> None:
        late.set()
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    deadline = threading.Timer(seconds, end)
    deadline.daemon = True
    deadline.start()
    try:
        response = connection.getresponse()
        length, body = response.length, response.read(MOST_ANSWER + 1)
    except (OSError, http.client.HTTPException):
        if late.is_set():
            raise TimeoutError from None
        raise
    finally:
        deadline.cancel()
    if late.is_set():
        raise TimeoutError
    # Read with a limit, a body that ends early is no error to http.client.
    if length is not None and len(body) < min(length, MOST_ANSWER + 1):
        raise http.client.IncompleteRead(body, length - len(body))
    return response.status, body


def error_message(answer: bytes) -> str:
    """What a server says in the body of a refusal; "" where it is not in the form that all of its APIs share."""
    try:
        return str(json.loads(answer)["error"]["message"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""
