"""Who may speak to the server at all: a pure ASGI middleware in front of every route.

Against web pages (foreign Host or Origin, cross-site simple requests, preflights), other local users (the key) and
bodies over the limit. A browser cannot be made to send a request that passes here, and no response carries a CORS
header.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import socket
from collections import Counter
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ftengine.api.envelopes import envelope, problem
from ftengine.api.http import json_response
from ftengine.api.settings import ServeSettings
from ftengine.errors import BadRequest, Forbidden, FtError, TooLarge

log = logging.getLogger("ftengine.api")

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
OPEN_PATHS = frozenset({"/", "/health", "/api/hello", "/openapi.json"})  # say nothing that needs a key


class UnsupportedMedia(BadRequest):
    status = 415


class Guard:
    def __init__(self, app: ASGIApp, settings: ServeSettings, refused: Counter[str]) -> None:
        """refused: requests by HTTP status, for /v1/stats."""
        self._app = app
        self._settings = settings
        self._refused = refused
        self._key = _digest(settings.api_key.strip().encode()) if settings.api_key is not None else None
        self._wildcard = is_wildcard(settings.host)
        names = {settings.host.lower(), *(name.lower() for name in settings.allowed_hosts)}
        if self._wildcard:
            names.add(socket.gethostname().lower())
        self._names = LOOPBACK_NAMES | names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # no websockets, no lifespan
            return
        try:
            self._check(scope)
        except FtError as error:
            status, body = envelope(scope["path"], problem(error))
            self._refused[str(status)] += 1
            log.info("%s %s: refused, %d %s", scope["method"], scope["path"][:100], status, error)
            headers = {"www-authenticate": "Bearer"} if status == 401 else None
            await json_response(body, status, headers)(scope, receive, send)
            return
        await self._app(scope, self._bounded(receive), send)

    def _check(self, scope: Scope) -> None:
        """Raises Forbidden, TooLarge or UnsupportedMedia."""
        headers = Headers(scope=scope)
        self._check_host(headers)
        self._check_origin(headers, scope)
        if self._key is not None and scope["path"] not in OPEN_PATHS:
            self._check_key(headers)
        if scope["method"] == "POST":  # no route reads a body of another method
            media = headers.get("content-type", "").partition(";")[0].strip().lower()
            if media != "application/json":
                raise UnsupportedMedia("send the body as Content-Type: application/json")
            if headers.get("content-encoding", "identity").lower() != "identity":
                raise UnsupportedMedia("send the body as it is, without Content-Encoding")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self._settings.limits.body_bytes:
            raise self._too_large()

    def _check_host(self, headers: Headers) -> None:
        """A name that an attacker's DNS may point here (rebinding) is none of ours."""
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._ours(_host_name(hosts[0])):
            raise Forbidden("this Host is not served here; it can be allowed when the server is started")

    def _ours(self, name: str) -> bool:
        if name in self._names:
            return True
        return self._wildcard and _is_address(name)  # an address cannot be rebound; a name can

    def _check_origin(self, headers: Headers, scope: Scope) -> None:
        site = headers.get("sec-fetch-site", "none").lower()
        if site not in ("none", "same-origin"):
            raise Forbidden("requests from web pages of other sites are refused")
        if "access-control-request-method" in headers:
            raise Forbidden("requests from web pages of other sites are refused (preflight)")
        origin = headers.get("origin")
        if origin is None:
            return
        try:
            parts = urlsplit(origin)
            port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
            same = self._ours((parts.hostname or "").lower()) and port == (scope.get("server") or ("", None))[1]
        except ValueError:
            same = False
        if not same:
            raise Forbidden("requests from web pages of other sites are refused (Origin)")

    def _check_key(self, headers: Headers) -> None:
        """Either header may hold it: some clients add a key of their own in the other one."""
        given = [value[7:] for value in headers.getlist("authorization") if value[:7].lower() == "bearer "]
        given += headers.getlist("x-api-key")
        assert self._key is not None
        # Headers were read as Latin-1; back to the bytes that came.
        matches = [hmac.compare_digest(_digest(value.strip().encode("latin-1")), self._key) for value in given[:8]]
        if not any(matches):
            raise Forbidden("the API key is missing or wrong (Authorization: Bearer KEY or x-api-key: KEY)", status=401)

    def _bounded(self, receive: Receive) -> Receive:
        """A body of unknown length ends with TooLarge as soon as it passes the limit."""
        seen = 0

        async def bounded() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._settings.limits.body_bytes:
                raise self._too_large()
            return message

        return bounded

    def _too_large(self) -> TooLarge:
        return TooLarge(f"the body is larger than {self._settings.limits.body_bytes} bytes")


def is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == ""


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _host_name(host: str) -> str:
    """The Host header without its port; brackets of an IPv6 address removed."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
