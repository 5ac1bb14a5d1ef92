"""Against servers that answer wrongly: each failure is one sentence."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ftengine.errors import FtError
from ftlaunch.bench import client
from ftlaunch.bench.client import Reply, Target, get, stream, streams
from ftlaunch.bench.decode import _rates
from ftlaunch.bench.place import address


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


USAGE = event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 3})
SAYS = event(choices=[{"text": "word", "finish_reason": None}])
ENDS = event(choices=[{"text": "", "finish_reason": "length"}])
DONE = b"data: [DONE]\n\n"


class Answers(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.server.asked.append((dict(self.headers), json.loads(self.rfile.read(int(self.headers["content-length"])))))
        status, body = self.server.answer
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()
        self.server.over.wait(self.server.silence)

    def do_GET(self) -> None:
        self.send_response(self.server.told)
        self.end_headers()
        self.wfile.write(b"[1, 2]")

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    answer: tuple[int, bytes] = 200, b""
    told = 200  # to a GET
    silence = 0.0
    daemon_threads = True


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Answers) as there:
        there.asked, there.over = [], threading.Event()
        thread = threading.Thread(target=there.serve_forever, args=[0.02])
        thread.start()
        yield there
        there.over.set()
        there.shutdown()
        thread.join()


def target(server: Server) -> Target:
    return Target(f"http://127.0.0.1:{server.server_port}", "model", "s3cret")


def test_a_whole_answer(server: Server) -> None:
    server.answer = 200, b": keep-alive\n\n" + SAYS + SAYS + ENDS + USAGE + DONE
    for reply in streams(target(server), "/v1/completions", [{"prompt": "a"}, {"prompt": "b"}]):
        assert (reply.prompt_tokens, reply.output_tokens, reply.cached_tokens) == (7, 3, None)
        assert len(reply.arrivals) == 2
        assert 0 < reply.first <= reply.last
        assert reply.finish == "length"
        assert reply.message["content"] == "wordword"
    headers, body = server.asked[0]
    assert headers["Authorization"] == "Bearer s3cret"
    assert (body["model"], body["stream"], body["stream_options"]) == ("model", True, {"include_usage": True})


def test_a_call_is_put_together(server: Server) -> None:
    def part(**fields: object) -> bytes:
        return event(choices=[{"delta": {"tool_calls": [{"index": 0, **fields}]}, "finish_reason": None}])

    ends = event(choices=[{"delta": {}, "finish_reason": "tool_calls"}])
    begin = part(id="call_1", type="function", function={"name": "read", "arguments": ""})
    more = [part(function={"arguments": piece}) for piece in ('{"path"', ': "a"}')]
    server.answer = 200, b"".join([begin, *more, ends, USAGE, DONE])
    [call] = stream(target(server), "/v1/chat/completions", {}).message["tool_calls"]
    assert call == {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((401, b'{"error": {"message": "a key is needed"}}'), "a key is needed"),
        ((500, b"<html>"), "answered 500"),
        ((200, b""), "is not OpenAI's form"),
        ((200, SAYS + event(error={"message": "the engine died"})), "the engine died"),
        ((200, SAYS), "before its answer was complete"),
        ((200, SAYS + ENDS + DONE), "is not OpenAI's form"),
        ((200, b"data: {nonsense\n\n"), "is not OpenAI's form"),
        ((200, b"data: [[]]\n\n"), "is not OpenAI's form"),
        ((200, b"data: " + b"[" * 100_000 + b"\n\n"), "is not OpenAI's form"),
    ],
)
def test_a_wrong_answer_is_one_sentence(answer: tuple[int, bytes], said: str, server: Server) -> None:
    server.answer = answer
    for count in (1, 2):
        with pytest.raises(FtError, match=said) as raised:
            streams(target(server), "/v1/completions", [{"prompt": "a"}] * count)
        assert raised.value.next_step


def test_silence_and_floods_end(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "SILENCE", 0.2)
    server.answer, server.silence = (200, SAYS), 5.0
    with pytest.raises(FtError, match="was silent for"):
        stream(target(server), "/v1/completions", {})
    monkeypatch.setattr(client, "SILENCE", 60.0)
    monkeypatch.setattr(client, "MOST_STREAM", 1000)
    server.answer = 200, SAYS * 100
    with pytest.raises(FtError, match="broke off"):
        stream(target(server), "/v1/completions", {})


def test_streams_one_after_the_other_are_not_added() -> None:
    first, second = (Reply(at, at + 1.0, (at, at + 1.0), 5, None, 11) for at in (0.5, 2.0))
    assert _rates([first, first], 11)["tokens_per_second"] == 20.0
    with pytest.raises(FtError, match="2 streams did not run at the same time"):
        _rates([first, second], 11)


def test_nobody_there(server: Server) -> None:
    assert get(target(server), "/health") == {}
    nobody = Target("http://127.0.0.1:1", "model")
    assert get(nobody, "/health") == {}
    with pytest.raises(FtError, match="does not answer"):
        stream(nobody, "/v1/completions", {})


@pytest.mark.parametrize(
    ("status", "said"), [(401, "wants another key"), (403, "wants another key"), (500, "no model")]
)
def test_an_address_without_models(server: Server, status: int, said: str) -> None:
    server.told = status
    with pytest.raises(FtError, match=rf"{said} \(HTTP {status}\)"):
        address(f"http://127.0.0.1:{server.server_port}", None)
