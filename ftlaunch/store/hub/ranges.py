"""Ranges of a repository's files: the request that asks for them, and everything that must be true of the answer.

All requests name the commit, so that files of two revisions cannot meet. The token goes to the Hub alone: redirects
are followed here, and a request to another origin carries none.
"""

from __future__ import annotations

import http.client
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote, urljoin, urlsplit

from ftlaunch.store.hub.connection import Connections, origin
from ftlaunch.store.hub.errors import HubError, Passing, no_access, seconds
from ftlaunch.store.hub.limits import Limits
from ftlaunch.store.hub.repository import RemoteFile, Repository

MAX_REDIRECTS = 6
CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})")
REDIRECTS = (301, 302, 303, 307, 308)


class Changed(Passing):
    """The server holds another version of the file than it did for earlier ranges."""


class Source:
    """A repository at one commit, as all connections know it. Safe to use from several threads."""

    def __init__(self, repository: Repository, token: str | None, limits: Limits) -> None:
        self.repository = repository
        self.token = token
        self.limits = limits
        self.located: dict[str, str] = {}  # path -> where the Hub last sent us for it
        self.versions: dict[str, str] = {}  # path -> ETag of the first range
        self.any_version: set[str] = set()  # paths of which the hash alone decides

    def url(self, file: RemoteFile) -> str:
        at = self.repository
        return f"{at.endpoint}/{at.name}/resolve/{at.commit}/{quote(file.path)}"

    def forget(self, file: RemoteFile) -> None:
        """Ask the Hub anew where the file lies, and let no ETag stand against it: servers of one CDN may differ."""
        self.located.pop(file.path, None)
        self.any_version.add(file.path)


class Body:
    """The announced bytes of one answer, read at a pace that is worth waiting for."""

    def __init__(self, response: http.client.HTTPResponse, length: int, limits: Limits) -> None:
        self.left = length
        self._response = response
        self._limits = limits
        self._since, self._won = time.monotonic(), 0

    def read(self, most: int) -> bytes:
        """At least one byte, at most `most`. Raises Passing when the answer ends before its time or only trickles."""
        try:
            data = self._response.read1(min(most, self.left))
        except (http.client.HTTPException, OSError, ValueError) as error:
            stalled = isinstance(error, TimeoutError)
            raise Passing("no byte came in time" if stalled else f"the connection broke ({error})") from None
        if not data:
            raise Passing("the answer was cut short")
        self.left -= len(data)
        self._keep_pace(len(data))
        return data

    def _keep_pace(self, count: int) -> None:
        self._won += count
        now = time.monotonic()
        if now - self._since >= self._limits.timeout:
            if self._won < self._limits.slowest * (now - self._since):
                raise Passing(f"bytes come at less than {self._limits.slowest / 1000:.1f} kB/s")
            self._since, self._won = now, 0


class Ranges:
    """One thread's way to a source."""

    def __init__(self, source: Source, connections: Connections) -> None:
        self._source = source
        self._connections = connections

    @contextmanager
    def open(self, file: RemoteFile, start: int, end: int) -> Iterator[Body]:
        """Bytes start..end (end excluded, not empty). Raises Passing, Changed or HubError."""
        url = self._source.located.get(file.path)
        response, url = self._locate(file, start, end) if url is None else (self._get(url, start, end), url)
        body: Body | None = None
        try:
            self._check_status(file, response, url)
            self._check_range(file, response, start, end)
            self._check_version(file, response)
            body = Body(response, end - start, self._source.limits)
            yield body
        finally:
            # Only an answer read to its end leaves the connection ready for the next request.
            if body is None or body.left or response.will_close:
                self._connections.drop(url)
            else:
                _finish(response, self._connections, url)

    def _locate(self, file: RemoteFile, start: int, end: int) -> tuple[http.client.HTTPResponse, str]:
        """Ask the Hub where the file lies, and there for its bytes."""
        url = self._source.url(file)
        for _ in range(MAX_REDIRECTS):
            response = self._get(url, start, end)
            self._check_headers(file, response)
            if response.status not in REDIRECTS:
                if url != self._source.url(file):
                    self._source.located[file.path] = url
                return response, url
            self._connections.drop(url)
            target = urljoin(url, response.headers.get("Location") or "")
            if urlsplit(url).scheme == "https" and urlsplit(target).scheme != "https":
                raise HubError(f"the Hub sends from https on to {target[:80]!a}, which is refused", "check HF_ENDPOINT")
            url = target
        raise Passing("too many redirects")

    def _get(self, url: str, start: int, end: int) -> http.client.HTTPResponse:
        headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity", "User-Agent": "ftlaunch"}
        if self._source.token and origin(url) == origin(self._source.repository.endpoint):
            headers["Authorization"] = f"Bearer {self._source.token}"
        return self._connections.get(url, headers)

    def _check_headers(self, file: RemoteFile, response: http.client.HTTPResponse) -> None:
        commit = response.headers.get("X-Repo-Commit")
        if commit and commit != self._source.repository.commit:
            raise Passing(f"the Hub answers with another revision ({commit[:12]!a})")
        announced = (response.headers.get("X-Linked-Etag") or "").strip('W/"').lower()
        if file.sha256 and announced and announced != file.sha256:
            raise Passing("the Hub announces another content than it listed")

    def _check_status(self, file: RemoteFile, response: http.client.HTTPResponse, url: str) -> None:
        status = response.status
        if status in (200, 206):
            return
        retry_after = seconds(response.headers.get("Retry-After"))
        if self._source.located.pop(file.path, None) is not None:
            raise Passing(f"HTTP {status}", retry_after)  # such addresses expire: the next attempt asks the Hub again
        at = self._source.repository
        own = origin(url) == origin(at.endpoint)
        if status in (401, 403) and own:
            gated = response.headers.get("X-Error-Code") == "GatedRepo"
            raise no_access(at.name, at.endpoint, gated, self._source.token is not None)
        if status == 404 and own:
            raise HubError(f"{file.path} of {at.name} is not on the Hub any more", f"ft pull {at.name}")
        raise Passing(f"HTTP {status}", retry_after)

    @staticmethod
    def _check_range(file: RemoteFile, response: http.client.HTTPResponse, start: int, end: int) -> None:
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise Passing("the server compresses what must come as it is")
        length = response.headers.get("Content-Length")
        if length is not None and length != str(end - start):
            raise Passing("the server sends another number of bytes than was asked for")
        if response.status == 200:
            if (start, end) != (0, file.size) or length is None:
                raise Passing("the server ignores the range that was asked for")
            return
        match = CONTENT_RANGE.fullmatch(response.headers.get("Content-Range") or "")
        if match is None or tuple(map(int, match.groups())) != (start, end - 1, file.size):
            raise Passing("the server sends another range than was asked for")

    def _check_version(self, file: RemoteFile, response: http.client.HTTPResponse) -> None:
        version = response.headers.get("ETag")
        if file.path in self._source.any_version:
            return
        if version and self._source.versions.setdefault(file.path, version) != version:
            self._source.versions[file.path] = version
            raise Changed("the server changed the file meanwhile")


def _finish(response: http.client.HTTPResponse, connections: Connections, url: str) -> None:
    try:
        response.read()
    except (http.client.HTTPException, OSError, ValueError):
        connections.drop(url)
