"""A stand-in for every paid cloud: listens on loopback, remembers who came, serves nobody.

It speaks just enough HTTP to learn the request line. CONNECT tells the host a client wanted to reach through a proxy.
"""

from __future__ import annotations

import socketserver
import threading
from types import TracebackType

REFUSAL = b'{"error":{"type":"invalid_request_error","message":"no such account"}}'
ANSWER = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(REFUSAL), REFUSAL)
)


class FakeCloud:
    """Used as a context manager; `visits` holds the first line of each connection, also of one that says nothing."""

    def __init__(self) -> None:
        self.visits: list[str] = []
        cloud = self

        class Visit(socketserver.StreamRequestHandler):
            timeout = 10  # seconds

            def handle(self) -> None:
                try:
                    line = self.rfile.readline(4096)
                except OSError:
                    line = b""
                cloud.visits.append(line.decode("latin-1").strip() or "(a connection without a request)")
                try:
                    self.wfile.write(ANSWER)
                except OSError:
                    pass  # the visit is what counts

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address = True
            daemon_threads = True

        self._server = Server(("127.0.0.1", 0), Visit)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FakeCloud:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
