"""A recording through the engine's loop: what the kernels saw of each decode step, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ftengine import wire
from ftengine.experts.slots import SlotPool
from ftengine.experts.trace import load_trace, store_trace
from ftengine.kernels.triton import cache_state as at
from ftengine.kernels.triton.buffers import RouteBuffers
from ftengine.kernels.triton.route import route
from ftengine.models.gpu.setup import TRACE_STEPS, GpuSetup
from ftengine.scheduler.loop import serve
from tests.gpu import models
from tests.gpu.cache_setup import HIDDEN, make_banks
from tests.scheduler.driver import Driver
from tests.scheduler.spawn import EngineProcess
from tests.scheduler.test_overlap import ScriptedChannel, submit
from tests.scheduler.tiny import TinyModel

LAYERS, EXPERTS, TOP_K, ROOM = 2, 8, 2, 4


class RoutingModel(TinyModel):
    """The scheduler's test model, which also routes random rows through a pool in each step without prefill."""

    def __init__(self, device: str, *, resident: bool, room: int = ROOM) -> None:
        super().__init__(recurrent=False)
        self.pool = SlotPool(
            make_banks(LAYERS, EXPERTS, device), 4, 8, TOP_K, device, resident=resident, trace_steps=room
        )
        self.experts = self
        self.lane = None
        self.place = device
        self.said: list[torch.Tensor] = []

    def forward(self, batch, cache):
        rows = len(batch.sequences)
        if len(batch.input_ids) == rows:
            buffers = RouteBuffers.allocate(rows, TOP_K, self.place)
            hidden = torch.zeros(rows, HIDDEN, device=self.place)
            layers = torch.randn(LAYERS, rows, EXPERTS, device=self.place)
            for number, logits in enumerate(layers):
                route(self.pool.tensors, number, logits, hidden, TOP_K, True, buffers, None)
            self.said.append(layers[:, 0].softmax(-1).cpu())
        return super().forward(batch, cache)


def traced(messages: list) -> list[wire.Traced]:
    return [message for message in messages if isinstance(message, wire.Traced)]


@pytest.mark.parametrize("resident", [False, True])
def test_the_next_steps_and_no_more(resident: bool, device: str, tmp_path: Path) -> None:
    """Begun while two requests are answered; more steps than the ring has room for."""
    torch.manual_seed(0)
    model = RoutingModel(device, resident=resident)
    before, wanted = 3, 10
    script = [[submit("a", [1, 2, 3], 20), submit("b", [4, 5], 7)], *[[]] * before, [wire.Trace(5, wanted)]]
    channel = ScriptedChannel(script, [])
    assert serve(Driver(model).engine, channel, 5.0) is None
    (answer,) = traced(channel.sent)
    assert (answer.id, answer.refusal) == (5, "")
    trace = store_trace(tmp_path / "trace.npz", answer.data)
    assert trace.steps == wanted < len(model.said) - before
    mass, ids = torch.stack(model.said[before : before + wanted]).sort(-1, descending=True)
    assert trace.ids.tolist() == ids[:, :, :TOP_K].tolist()
    torch.testing.assert_close(torch.from_numpy(trace.probabilities), mass, rtol=5e-3, atol=1e-4)
    assert load_trace(tmp_path / "trace.npz").experts == EXPERTS
    assert model.pool.tensors.control[at.TRACE.value] == 0
    assert int(model.pool.tensors.state[at.TRACED.value]) == wanted


def test_one_that_nobody_waits_for_any_more(device: str) -> None:
    model = RoutingModel(device, resident=True)
    script = [
        [submit("a", [1, 2, 3], 20), wire.Trace(1, 15)],
        [wire.Trace(2, 3), wire.StopTrace(2)],  # refused, and so not there to be stopped
        [],
        [wire.StopTrace(1), wire.Trace(3, 2)],
    ]
    channel = ScriptedChannel(script, [])
    serve(Driver(model).engine, channel, 5.0)
    refused, whole = traced(channel.sent)
    assert (refused.id, refused.refusal) == (2, "a recording is under way")
    assert (whole.id, whole.refusal) == (3, "")


def test_a_failure_of_the_recording_is_not_the_requests(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = RoutingModel(device, resident=True)

    def lost(start: int, end: int):
        raise RuntimeError("the copy failed")

    monkeypatch.setattr(model.pool, "trace_of", lost)
    channel = ScriptedChannel([[submit("a", [1, 2, 3], 6), wire.Trace(1, 2)]], [])
    serve(Driver(model).engine, channel, 5.0)
    (answer,) = traced(channel.sent)
    assert answer.refusal == "the recording failed: the copy failed"
    tokens = [token for message in channel.sent if isinstance(message, wire.Output) for token in message.tokens]
    assert tokens == model.greedy([1, 2, 3], 6)


def test_who_has_nothing_to_record(device: str) -> None:
    without = RoutingModel(device, resident=True)
    without.pool = None
    for model, reason in (
        (TinyModel(recurrent=False), "the CPU engine has no cache of experts"),
        (without, "the model has no routed experts"),
        (RoutingModel(device, resident=True, room=0), "without room for a trace"),
    ):
        channel = ScriptedChannel([[wire.Trace(1, 2)]], [])
        serve(Driver(model).engine, channel, 5.0)
        (answer,) = traced(channel.sent)
        assert reason in answer.refusal


def test_every_engine_on_a_gpu_has_room() -> None:
    assert GpuSetup("resident", max_running=1, context=8, page_size=4).trace_steps == TRACE_STEPS > 0


def test_the_real_engine(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process, with graphs captured before anybody thought of recording. Prompts are not recorded."""
    monkeypatch.setenv("FT_HOME", str(tmp_path / "home"))
    folder = models.write("qwen3", tmp_path / "qwen3")
    settings = {"dtype": "float32", "context": 24, "page_size": 4, "max_running_requests": 2, "prefill_chunk": 16}
    name = "interpret" if device == "cpu" else device
    with EngineProcess(folder, plugins="", device=name, moe_backend="resident", **settings) as engine:
        engine.socket.settimeout(240)
        ready = engine.start()
        assert isinstance(ready, wire.Ready), ready
        engine.send(wire.Trace(1, 4))
        engine.submit("a", models.prompt_of(5), 3)
        engine.collect("a")
        engine.submit("b", models.prompt_of(5, seed=6), 4)
        while not isinstance(found := engine.receive(), wire.Traced):
            pass
        assert found.refusal == ""
        trace = store_trace(tmp_path / "trace.npz", found.data)
        assert (trace.steps, trace.layers, trace.top_k, trace.experts) == (4, 1, 2, 6)
        assert (trace.near == trace.near.astype(int)).all()
        assert (trace.near[:, :, :2] == trace.ids).all()
        assert abs(trace.probabilities.sum(-1) - 1).max() < 0.01  # all six are within the sixteen
        assert (trace.probabilities[:, :, :-1] >= trace.probabilities[:, :, 1:] - 1e-3).all()
