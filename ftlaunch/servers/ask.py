"""Questions to a server: over loopback and never through a proxy."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import TYPE_CHECKING, Any

from ftlaunch.servers.record import ServerRecord

if TYPE_CHECKING:
    import http.client

MOST_BYTES = 8 << 20


def ask(record: ServerRecord, path: str, timeout: float = 2.0) -> dict[str, Any] | None:
    """The JSON object that `GET path` gives (docs/api.md), or None when there is none. `timeout`: seconds for all of it
    and not only between two bytes, for anything may listen on the port of a server that ended.
    """
    import http.client
    import threading
    from urllib.parse import urlsplit

    target = urlsplit(record.url)
    headers = {"Authorization": f"Bearer {record.api_key}"} if record.api_key else {}
    connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=timeout)
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


def _end(connection: http.client.HTTPConnection) -> None:
    """Reading goes on as at the end of the stream."""
    with contextlib.suppress(OSError):
        if connection.sock is not None:
            connection.sock.shutdown(socket.SHUT_RDWR)


def fetch(record: ServerRecord, path: str, body: dict[str, Any], next_step: str) -> bytes:
    """What `POST path` answers with 200, however long that takes.

    Raises FtError with what the server says else, and with `next_step`.
    """
    import http.client
    from urllib.parse import urlsplit

    from ftengine.errors import FtError

    target = urlsplit(record.url)
    headers = {"Authorization": f"Bearer {record.api_key}"} if record.api_key else {}
    headers["Content-Type"] = "application/json"
    connection = http.client.HTTPConnection(target.hostname or "", target.port)
    try:
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        status, answer = response.status, response.read()
    except (OSError, http.client.HTTPException) as error:
        raise FtError(f"the server of {record.served_name} at {record.url} does not answer", next_step) from error
    finally:
        connection.close()
    if status != 200:
        raise FtError(_reason(answer) or f"the server answered with status {status}", next_step)
    return answer


def _reason(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["error"]["message"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""
