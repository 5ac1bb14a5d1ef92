"""One thread's connections: HTTP/1.1 GETs whose bodies are read in large pieces, kept open between requests.

The standard library's client and not httpx: that one hands out bodies in pieces of 64 KiB through a parser in Python,
which took more of a core than the SHA-256 of the same bytes. Certificates are httpx's choice plus the system's.
"""

from __future__ import annotations

import functools
import http.client
import ipaddress
import socket
import ssl
from base64 import b64encode
from collections.abc import Mapping
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from ftlaunch.store.hub.errors import HubError, Passing


def origin(url: str) -> tuple[str, str, int]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


class Connections:
    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._open: dict[tuple[str, str, int], http.client.HTTPConnection] = {}

    def get(self, url: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
        """The answer, its body unread. Raises Passing, or HubError for a certificate that does not fit."""
        parts, key = urlsplit(url), origin(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise HubError(f"the Hub sends on to {url[:80]!a}, which is no web address", "check HF_ENDPOINT")
        again = key in self._open  # a connection left open may have been closed by the other side meanwhile
        try:
            return self._request(key, parts, headers)
        except (http.client.HTTPException, OSError) as error:
            self.drop(url)
            if isinstance(error, ssl.SSLCertVerificationError):
                raise _untrusted(parts, error) from None
            if not again or isinstance(error, TimeoutError):
                raise _passing(error) from None
        try:
            return self._request(key, parts, headers)
        except (http.client.HTTPException, OSError) as error:
            self.drop(url)
            raise _passing(error) from None

    def _request(
        self, key: tuple[str, str, int], parts: SplitResult, headers: Mapping[str, str]
    ) -> http.client.HTTPResponse:
        connection = self._open.get(key)
        if connection is None:
            connection = self._open[key] = _connection(key, self._timeout)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        if key[0] == "http" and _proxy(key) is not None:
            target, headers = f"http://{parts.netloc}{target}", {**headers, **_proxy_headers(key)}
        connection.request("GET", target, headers={"Host": parts.netloc.rpartition("@")[2], **headers})
        return connection.getresponse()

    def drop(self, url: str) -> None:
        """Close the connection to the server of `url`: what it still sends is not wanted."""
        connection = self._open.pop(origin(url), None)
        if connection is not None:
            connection.close()

    def interrupt(self) -> None:
        """From another thread: a read that waits ends now."""
        for connection in list(self._open.values()):
            sock = connection.sock
            if sock is not None:
                try:
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)  # SSLSocket's own would also take its state apart
                except OSError:
                    pass

    def close(self) -> None:
        for connection in self._open.values():
            connection.close()
        self._open.clear()


def _connection(key: tuple[str, str, int], timeout: float) -> http.client.HTTPConnection:
    scheme, host, port = key
    proxy = _proxy(key)
    if scheme == "http":
        where = (proxy.hostname or "", proxy.port or 80) if proxy else (host, port)
        return http.client.HTTPConnection(*where, timeout=timeout)
    if proxy is None:
        return http.client.HTTPSConnection(host, port, timeout=timeout, context=_context())
    tunnel = http.client.HTTPSConnection(proxy.hostname or "", proxy.port or 80, timeout=timeout, context=_context())
    tunnel.set_tunnel(host, port, headers=_proxy_headers(key))
    return tunnel


@functools.lru_cache(maxsize=1)
def _context() -> ssl.SSLContext:
    import httpx

    context = httpx.create_ssl_context()
    context.load_default_certs()
    return context


def _proxy(key: tuple[str, str, int]) -> SplitResult | None:
    """By HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY; never for this machine itself."""
    scheme, host, _ = key
    if host == "localhost" or _is_loopback(host) or proxy_bypass(host):
        return None
    proxies = getproxies()
    chosen = proxies.get(scheme) or proxies.get("all")
    return urlsplit(chosen if "://" in chosen else f"http://{chosen}") if chosen else None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _proxy_headers(key: tuple[str, str, int]) -> dict[str, str]:
    proxy = _proxy(key)
    if proxy is None or proxy.username is None:
        return {}
    secret = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}".encode()
    return {"Proxy-Authorization": f"Basic {b64encode(secret).decode()}"}


def _untrusted(parts: SplitResult, error: ssl.SSLCertVerificationError) -> HubError:
    return HubError(
        f"the certificate of {parts.hostname} is not trusted: {error.verify_message}",
        "behind a company's proxy, name its certificates: SSL_CERT_FILE=FILE ft pull ...",
    )


def _passing(error: Exception) -> Passing:
    if isinstance(error, TimeoutError):
        return Passing("no answer in time")
    return Passing(str(getattr(error, "strerror", None) or error)[:200] or type(error).__name__)
