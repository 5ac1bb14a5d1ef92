"""A Hub on loopback: the routes that huggingface_hub asks, and a second server, the CDN, that holds the large files.

Shaped after what the real one answers (https://huggingface.co/docs/huggingface_hub/package_reference/file_download):
`/api/models/{id}/revision/{rev}` with sizes and hashes, `/{id}/resolve/{commit}/{file}` with ETag and X-Repo-Commit,
large files by a redirect with X-Linked-Etag to an address on another host, here another port. The CDN counts the bytes
it sends, can be throttled, and injects one fault a request as `fault` decides.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
Headers = dict[str, str]


def git_blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Repo:
    files: dict[str, bytes]
    commit: str = COMMIT
    refs: tuple[str, ...] = ("main",)
    token: str = ""  # needed to read it
    gated: bool = False
    listed: dict[str, bytes] = field(default_factory=dict)  # told in the listing instead of what is served

    def is_lfs(self, name: str) -> bool:
        return name.endswith((".safetensors", ".gguf", ".bin", ".pt"))

    def siblings(self) -> list[dict[str, object]]:
        rows = []
        for name, content in {**self.files, **self.listed}.items():
            row: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": git_blob(content)}
            if self.is_lfs(name):
                row["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 135}
            rows.append(row)
        return rows


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.asked: list[tuple[str, str, Headers]] = []  # method, path, headers
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that leaves is no error here."""


class Cdn(Server):
    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.fault: Callable[[str, int], str | None] = lambda blob, start: None  # the name of a fault, or None
        self.rate = 0.0  # bytes per second over all connections; 0: as fast as it goes
        self.sent = 0
        self.lock = threading.Lock()
        self.due = 0.0
        super().__init__(CdnHandler)

    def account(self, count: int) -> None:
        """Count bytes, and wait for the time at which they may go."""
        with self.lock:
            self.sent += count
            if not self.rate:
                return
            now = time.monotonic()
            self.due = max(self.due, now - 0.05) + count / self.rate
            wait = self.due - now
        if wait > 0:
            time.sleep(wait)


class Hub(Server):
    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.cdn = Cdn()
        self.status: Callable[[str], tuple[int, Headers] | None] = lambda path: (
            None
        )  # an answer instead of the right one
        super().__init__(HubHandler)

    def add(self, name: str, files: dict[str, bytes], **settings: object) -> Repo:
        repo = Repo(files, **settings)  # type: ignore[arg-type]
        self.repos[name] = repo
        for path, content in files.items():
            if repo.is_lfs(path):
                self.cdn.blobs[self.blob_name(repo, path)] = content
        return repo

    @staticmethod
    def blob_name(repo: Repo, path: str) -> str:
        return hashlib.sha256((repo.commit + path).encode()).hexdigest()[:32]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server
    wbufsize = 1 << 16

    def log_message(self, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.handle_request(with_body=False)

    def do_GET(self) -> None:
        self.handle_request(with_body=True)

    def handle_request(self, *, with_body: bool) -> None:
        self.server.asked.append((self.command, self.path, dict(self.headers.items())))
        try:
            self.answer(with_body)
        except OSError:
            self.close_connection = True

    def answer(self, with_body: bool) -> None:
        raise NotImplementedError

    def range(self, size: int) -> tuple[int, int] | None:
        """start, end (excluded)"""
        value = self.headers.get("Range")
        if value is None:
            return None
        first, _, last = value.removeprefix("bytes=").partition("-")
        return int(first), min(size, int(last) + 1)

    def send(self, status: int, headers: Headers, body: bytes = b"", with_body: bool = True) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)
        self.wfile.flush()


class HubHandler(Handler):
    server: Hub

    def answer(self, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        instead = self.server.status(path)
        if instead is not None:
            self.send(instead[0], instead[1], b"", with_body)
            return
        if path.startswith("/api/models/") and "/tree/" in path:
            name, _, _ = path.removeprefix("/api/models/").partition("/tree/")
            self.tree(name, with_body)
            return
        if path.startswith("/api/models/"):
            name, _, revision = path.removeprefix("/api/models/").partition("/revision/")
            self.info(name, revision or "main", with_body)
            return
        name, _, rest = path.removeprefix("/").partition("/resolve/")
        revision, _, file = rest.partition("/")
        self.resolve(name, revision, file, with_body)

    def allowed(self, repo: Repo | None) -> bool:
        if repo is None or (repo.token and self.headers.get("Authorization") != f"Bearer {repo.token}"):
            if repo is not None and repo.gated:
                self.send(403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to model is restricted"})
            else:
                self.send(401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
            return False
        return True

    def info(self, name: str, revision: str, with_body: bool) -> None:
        repo = self.server.repos.get(name)
        if not self.allowed(repo):
            return
        assert repo is not None
        if revision not in (*repo.refs, repo.commit):
            self.send(404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
            return
        content = {"id": name, "modelId": name, "sha": repo.commit, "siblings": repo.siblings(), "tags": []}
        body = json.dumps({**content, "private": False}).encode()
        self.send(200, {"Content-Type": "application/json"}, body, with_body)

    def tree(self, name: str, with_body: bool) -> None:
        repo = self.server.repos.get(name)
        if not self.allowed(repo):
            return
        assert repo is not None
        rows = []
        for sibling in repo.siblings():
            lfs: Any = sibling.get("lfs")
            large = {"lfs": {"oid": lfs["sha256"], "size": lfs["size"], "pointerSize": 135}} if lfs else {}
            path, size = sibling["rfilename"], sibling["size"]
            rows.append({"type": "file", "oid": sibling["blobId"], "path": path, "size": size, **large})
        self.send(200, {"Content-Type": "application/json"}, json.dumps(rows).encode(), with_body)

    def resolve(self, name: str, revision: str, file: str, with_body: bool) -> None:
        repo = self.server.repos.get(name)
        if not self.allowed(repo):
            return
        assert repo is not None
        if revision not in (*repo.refs, repo.commit) or file not in repo.files:
            self.send(404, {"X-Error-Code": "EntryNotFound"})
            return
        content = repo.files[file]
        headers = {"X-Repo-Commit": repo.commit, "Accept-Ranges": "bytes"}
        if repo.is_lfs(file):
            location = f"{self.server.cdn.url}/{self.server.blob_name(repo, file)}?signature=x"
            linked = {"X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Linked-Size": str(len(content))}
            self.send(302, {**headers, **linked, "Location": location})
            return
        headers["ETag"] = f'"{git_blob(content)}"'
        span = self.range(len(content))
        if span is None:
            self.send(200, headers, content, with_body)
            return
        start, end = span
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
        self.send(206, headers, content[start:end], with_body)


class CdnHandler(Handler):
    server: Cdn

    def answer(self, with_body: bool) -> None:
        name = urlsplit(self.path).path.removeprefix("/")
        content = self.server.blobs.get(name)
        if content is None:
            self.send(404, {})
            return
        start, end = self.range(len(content)) or (0, len(content))
        fault = self.server.fault(name, start) if with_body else None
        if fault is not None and fault.isdigit():
            self.send(int(fault), {"Retry-After": "0"} if fault == "429" else {})
            return
        if fault == "wait an hour":
            self.send(429, {"Retry-After": "3600"})
            return
        status, first, last, body = 206, start, end - 1, memoryview(content)[start:end]
        etag = hashlib.md5(content).hexdigest()
        if fault == "another version":
            etag = hashlib.md5(str(time.monotonic()).encode()).hexdigest()
        elif fault == "wrong range":
            first, last = start + 1, end
        elif fault == "short range":
            last, body = start + len(body) // 2, body[: len(body) // 2 + 1]
        elif fault == "no range":
            status, body = 200, memoryview(content)
        elif fault == "flipped bit":
            changed = bytearray(body)
            changed[len(changed) // 2] ^= 4
            body = memoryview(changed)
        self.send_response(status)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("Content-Length", str(len(body)))
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        if fault == "compressed":
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        if with_body:
            self.stream(body, fault)

    def stream(self, body: memoryview, fault: str | None) -> None:
        whole = len(body)
        if fault in ("reset", "stall", "truncated", "trickle"):
            body = body[: whole // 3]
        step = 1 << 18
        for start in range(0, len(body), step):
            piece = body[start : start + step]
            self.server.account(len(piece))
            self.wfile.write(piece)
        self.wfile.flush()
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif fault == "stall":
            self.wait_for_the_client(60)
        elif fault == "trickle":
            for _ in range(60):  # 1 KB a second, in small drops
                self.wfile.write(b"x" * 102)
                self.wfile.flush()
                time.sleep(0.1)
        if fault in ("reset", "stall", "truncated", "trickle"):
            self.close_connection = True
            self.connection.close()

    def wait_for_the_client(self, seconds: float) -> None:
        self.connection.settimeout(seconds)
        with contextlib.suppress(OSError):
            self.connection.recv(1)


@contextlib.contextmanager
def hub() -> Iterator[Hub]:
    server = Hub()
    try:
        yield server
    finally:
        for each in (server, server.cdn):
            each.shutdown()
            each.server_close()
