"""A range server that costs little: of one file, which the kernel copies into the sockets. Prints its port.

`python sendfile_server.py FILE RATE` stands for the CDN of the Hub where speed is measured. RATE: bytes per second over
all connections, 0 for no limit.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import time

STEP = 1 << 20


class Throttle:
    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.due = 0.0
        self.lock = threading.Lock()

    def wait(self, count: int) -> None:
        if not self.rate:
            return
        with self.lock:
            now = time.monotonic()
            self.due = max(self.due, now - 0.02) + count / self.rate
            rest = self.due - now
        if rest > 0:
            time.sleep(rest)


def serve(client: socket.socket, path: str, throttle: Throttle) -> None:
    size = os.path.getsize(path)
    fd = os.open(path, os.O_RDONLY)
    received = b""
    try:
        while True:
            while b"\r\n\r\n" not in received:
                data = client.recv(65536)
                if not data:
                    return
                received += data
            head, _, received = received.partition(b"\r\n\r\n")
            match = re.search(rb"range: bytes=(\d+)-(\d+)", head, re.IGNORECASE)
            start, last = (int(match[1]), int(match[2])) if match else (0, size - 1)
            lines = (
                "HTTP/1.1 206 Partial Content",
                f"Content-Range: bytes {start}-{last}/{size}",
                f"Content-Length: {last - start + 1}",
                'ETag: "x"',
            )
            client.sendall("\r\n".join((*lines, "", "")).encode())
            while start <= last:
                count = min(STEP, last - start + 1)
                throttle.wait(count)
                start += os.sendfile(client.fileno(), fd, start, count)
    except OSError:
        pass
    finally:
        os.close(fd)
        client.close()


def main(path: str, rate: float) -> None:
    throttle = Throttle(rate)
    server = socket.create_server(("127.0.0.1", 0), backlog=64)
    print(server.getsockname()[1], flush=True)
    while True:
        client, _ = server.accept()
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=serve, args=(client, path, throttle), daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
