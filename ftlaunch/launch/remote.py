"""A server named by its URL: what it serves and how much context it holds."""

from __future__ import annotations

import json
import re
import time
from typing import Any
from urllib.parse import urlsplit

from ftengine.errors import FtError
from ftlaunch.launch.request import Progress

TIMEOUT = 10.0  # seconds
POLL_SECONDS = 0.5
BLANK = re.compile(r"[\x00-\x20\x7f]")  # what no request line can carry
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def base_url(url: str) -> str:
    """Without a trailing slash or `/v1`. Raises FtError for what is not an HTTP address."""
    text = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable or BLANK.search(text) or parts.query or parts.fragment or parts.username:
        raise FtError(f"{url!r} is not the address of a server", "give one such as --server http://127.0.0.1:1919")
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


def wait_loaded(url: str, api_key: str | None, on_progress: Progress) -> None:
    """Wait while an ft server there loads its model; other servers do not say and are taken as ready."""
    while True:
        status, answer = _get(f"{url}/health", api_key)
        state = answer.get("status") if status == 200 else None
        if state == "failed":
            error = answer.get("error")
            reason = error.get("message") if isinstance(error, dict) else error
            raise FtError(f"the server at {url} failed: {reason or 'it does not say why'}")
        if state not in ("loading", "restarting"):
            return
        done = answer.get("progress")
        on_progress(str(answer.get("stage") or "loading"), float(done) if isinstance(done, (int, float)) else 0.0)
        time.sleep(POLL_SECONDS)


def model_entry(url: str, api_key: str | None, model: str | None) -> dict[str, Any]:
    """The entry of `/v1/models` for `model`, or the first. Raises FtError when there is none or a key is wanted."""
    status, answer = _get(f"{url}/v1/models", api_key)
    if status in (401, 403):
        raise FtError(
            f"the server at {url} wants a key" if api_key is None else f"the server at {url} refuses this key",
            "set FT_API_KEY to the server's key",
        )
    listed = answer.get("data")
    entries = (
        [entry for entry in listed if isinstance(entry, dict) and "id" in entry] if isinstance(listed, list) else []
    )
    if not entries:
        raise FtError(f"the server at {url} names no model (HTTP {status})", f"look at {url}/v1/models")
    if model is None:
        return entries[0]
    for entry in entries:
        if entry["id"] == model:
            return entry
    known = ", ".join(str(entry["id"]) for entry in entries)
    raise FtError(f"the server at {url} has no model {model} (it has: {known})", f"--model {entries[0]['id']}")


def _get(url: str, api_key: str | None) -> tuple[int, dict[str, Any]]:
    """Status and JSON object of the answer, {} when it is something else. Loopback is never asked through a proxy.

    A redirection is not followed: it would carry the key to another server.
    """
    import http.client
    import urllib.error
    import urllib.request

    class Stay(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: object) -> None:
            return None

    if api_key and not (api_key.isascii() and api_key.isprintable()):  # the library's own error would print it
        raise FtError(
            "FT_API_KEY holds a character that no request can carry, such as a line end",
            "set FT_API_KEY to the server's key",
        )
    handlers: list[urllib.request.BaseHandler] = [Stay()]
    if urlsplit(url).hostname in LOOPBACK:
        handlers.append(urllib.request.ProxyHandler({}))
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - base_url lets http and https through
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=TIMEOUT) as response:
            return response.status, _json(response.read(1 << 22))
    except urllib.error.HTTPError as error:
        with error:
            return error.code, _json(error.read(1 << 20))
    except http.client.HTTPException:  # another protocol's greeting, or an answer cut off
        raise FtError(f"what answers at {_origin(url)} does not speak HTTP", "ft ps") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise FtError(f"no server answers at {_origin(url)}: {reason}", "ft ps") from None


def _origin(url: str) -> str:
    """The server's own address: without the `/health` or `/v1/models` that was asked for."""
    return url.rpartition("/")[0].removesuffix("/v1")


def _json(body: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return answer if isinstance(answer, dict) else {}
