"""A pull's speed against the same ranged GETs, hashed and synced by a program of thirty lines, and against a throttle.

`pytest -m slow tests/store/test_fetch_speed.py -s` prints the figures; the machine should do nothing else.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from ftlaunch.store.folder import Folder
from ftlaunch.store.hub.limits import SPAN, Limits
from ftlaunch.store.hub.ranges import Source
from ftlaunch.store.hub.repository import RemoteFile, Repository
from ftlaunch.store.hub.transfer import Transfer
from tests.support import sendfile_server

SIZE = 1 << 30
CONNECTIONS = 8
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    path, digest = tmp_path_factory.mktemp("speed") / "content", hashlib.sha256()
    with path.open("wb") as file:
        for _ in range(SIZE >> 24):
            block = os.urandom(1 << 24)
            digest.update(block)
            file.write(block)
    return path, digest.hexdigest()


@contextmanager
def server(path: Path, rate: float = 0) -> Iterator[int]:
    command = [sys.executable, sendfile_server.__file__, str(path), str(rate)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.terminate()


def baseline(port: int, folder: Path, sha256: str) -> float:
    """Seconds of the plain way: threads get ranges and write them, one thread hashes behind them, one sync."""
    spans = [(start, min(start + SPAN, SIZE)) for start in range(0, SIZE, SPAN)]
    arrived = {start: threading.Event() for start, _ in spans}
    queue, lock = list(spans), threading.Lock()
    fd = os.open(folder / "plain", os.O_RDWR | os.O_CREAT | os.O_TRUNC)

    def work() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        buffer = memoryview(bytearray(1 << 20))
        while True:
            with lock:
                if not queue:
                    return connection.close()
                start, end = queue.pop(0)
            connection.request("GET", "/", headers={"Range": f"bytes={start}-{end - 1}"})
            response, position = connection.getresponse(), start
            while count := response.readinto(buffer[: min(1 << 20, end - position)]):
                os.pwrite(fd, buffer[:count], position)
                position += count
            response.read()
            arrived[start].set()

    began = time.monotonic()
    threads = [threading.Thread(target=work) for _ in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    digest = hashlib.sha256()
    for start, end in spans:
        arrived[start].wait()
        for position in range(start, end, 4 << 20):
            digest.update(os.pread(fd, 4 << 20, position))
    for thread in threads:
        thread.join()
    os.fsync(fd)
    os.close(fd)
    assert digest.hexdigest() == sha256
    return time.monotonic() - began


def ours(port: int, folder: Path, sha256: str) -> float:
    endpoint = f"http://127.0.0.1:{port}"
    repository = Repository("org/name", "0" * 40, "main", endpoint, ())
    began = time.monotonic()
    with Folder.at(folder) as root, root.child("work") as work:
        source = Source(repository, None, Limits(connections=CONNECTIONS))
        transfer = Transfer(source, work, [RemoteFile("x.safetensors", SIZE, sha256, "")], lambda event: None, "")
        with closing(transfer):
            transfer.run()
        seconds = time.monotonic() - began
        root.remove("work")
    return seconds


def test_within_ten_percent_of_the_plain_way(content: tuple[Path, str], tmp_path: Path) -> None:
    """Medians of five rounds in turn, on the same disk."""
    path, sha256 = content
    plain, pulled = [], []
    with server(path) as port:
        for _ in range(5):
            plain.append(baseline(port, tmp_path, sha256))
            pulled.append(ours(port, tmp_path, sha256))
            (tmp_path / "plain").unlink()
    rates = [SIZE / statistics.median(times) / 1e6 for times in (plain, pulled)]
    print(f"\nplain {rates[0]:.0f} MB/s, ft pull {rates[1]:.0f} MB/s, {rates[1] / rates[0]:.2f}")
    assert rates[1] >= 0.9 * rates[0]


def test_within_ten_percent_of_a_server_of_300_mb_a_second(content: tuple[Path, str], tmp_path: Path) -> None:
    path, sha256 = content
    with server(path, 300e6) as port:
        seconds = [ours(port, tmp_path, sha256) for _ in range(3)]
    rate = SIZE / statistics.median(seconds) / 1e6
    print(f"\nft pull {rate:.0f} MB/s of 300")
    assert rate >= 270
