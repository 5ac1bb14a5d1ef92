"""One question to a server: over loopback and never through a proxy."""

from __future__ import annotations

import json
from typing import Any

from ftlaunch.servers.record import ServerRecord

MOST_BYTES = 8 << 20


def ask(record: ServerRecord, path: str, timeout: float = 2.0) -> dict[str, Any] | None:
    """The JSON object that `GET path` gives (docs/api.md), or None when there is none. `timeout` in seconds."""
    import http.client
    from urllib.parse import urlsplit

    target = urlsplit(record.url)
    headers = {"Authorization": f"Bearer {record.api_key}"} if record.api_key else {}
    connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=timeout)
    try:
        connection.request("GET", path, headers=headers)
        body = json.loads(connection.getresponse().read(MOST_BYTES))
    except (OSError, http.client.HTTPException, ValueError, RecursionError):
        return None
    finally:
        connection.close()
    return body if isinstance(body, dict) else None
