"""Steps in which memory runs out or the device is lost: who is told what, and what goes on."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ftengine import wire
from ftengine.core import SamplingParams
from ftengine.errors import FtError
from ftengine.scheduler.loop import serve
from tests.scheduler.driver import Driver
from tests.scheduler.launching import LaunchingModel
from tests.scheduler.spawn import EngineProcess
from tests.scheduler.test_engine import prompt
from tests.scheduler.test_overlap import ScriptedChannel, submit
from tests.scheduler.tiny import LOSS, TinyModel, write_checkpoint

REQUESTS = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.0, "seed": 3, "top_p": 0.9},
    "adjusted": {"temperature": 0.8, "seed": 4, "repetition_penalty": 1.2, "presence_penalty": 0.3, "logprobs": 2},
}


class Starved(TorchDispatchMode):
    """The n-th operation that takes new memory fails, from 1 on; the others work."""

    def __init__(self, fails: int, error: Exception) -> None:
        super().__init__()
        self.left = fails
        self.error = error

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {_storage(value) for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)}
        if any(isinstance(value, torch.Tensor) and _storage(value) not in given for value in tree_iter(result)):
            self.left -= 1
            if self.left == 0:
                raise self.error
        return result


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def answers(driver: Driver, suffix: str) -> dict[str, list[int]]:
    for name, sampling in REQUESTS.items():
        driver.submit(name + suffix, prompt(6, seed=len(name)), 3, **sampling)
    driver.run()
    return {name: driver.results[name + suffix].tokens for name in REQUESTS}


@pytest.mark.parametrize(("model", "step"), [(TinyModel, 1), (LaunchingModel, 4)])
def test_out_of_memory_at_any_allocation_of_a_step(model: type[TinyModel], step: int) -> None:
    """n = 1..100: its requests fail as overloaded, nothing leaks, and the same requests then get the answers that an
    undisturbed engine gives."""
    expected = answers(Driver(model(recurrent=True)), "")
    driver = Driver(model(recurrent=True), pages=200)
    for fails in range(1, 101, step):
        for name, sampling in REQUESTS.items():
            driver.submit(f"{name} {fails}", prompt(6, seed=len(name)), 3, **sampling)
        starved = Starved(fails, torch.OutOfMemoryError("CUDA out of memory."))
        while driver.engine.has_work:
            driver._take(driver.engine.admit())
            with starved:
                events = driver.engine.step()
            driver._take(events)
        assert starved.left <= 0, "so many allocations never happen"
        failed = [driver.results[f"{name} {fails}"] for name in REQUESTS if driver.results[f"{name} {fails}"].error]
        assert failed
        for result in failed:
            assert result.overloaded
            assert "ran out of memory" in (result.error or "")
        driver.engine.scheduler.check_integrity()
        driver.engine.scheduler.check_idle()
        assert driver.engine.lost is None
        if fails % 20 == 1:
            assert answers(driver, f" again {fails}") == expected
    assert driver.engine.stats()["requests"]["failed"] >= 100 // step


def test_steps_become_smaller_when_memory_ran_out() -> None:
    """Of a prompt of 48 tokens, 32 at a time: after the step that failed 16, for good."""
    model = LaunchingModel(recurrent=True)
    driver = Driver(model, chunk=32)
    driver.engine.budget.tokens = 32
    model.launch_error = torch.OutOfMemoryError("CUDA out of memory.")
    driver.submit("starves", prompt(48), 2)
    driver.step()
    assert driver.results["starves"].overloaded
    model.launch_error = None
    assert driver.engine.budget.tokens == 16
    assert driver.one(prompt(48, seed=2), 2).tokens == model.greedy(prompt(48, seed=2), 2)
    assert driver.engine.budget.tokens == 16
    driver.submit("fails", prompt(48, seed=3), 2)
    model.launch_error = RuntimeError("shapes differ")
    driver.step()
    assert not driver.results["fails"].overloaded
    assert driver.engine.budget.tokens == 16


LOST = [
    (RuntimeError("CUDA error: an illegal memory access was encountered"), "illegal memory access", ""),
    (RuntimeError("Triton Error [CUDA]: unspecified launch failure"), "unspecified launch failure", ""),
    (
        FtError("the CPU gave no answer", "ft serve --moe-backend offload"),
        "no answer",
        "ft serve --moe-backend offload",
    ),
]


@pytest.mark.parametrize(("error", "says", "advises"), LOST)
@pytest.mark.parametrize("where", ["launch_error", "collect_error"])
def test_after_a_lost_device_every_request_fails_and_the_loop_ends(
    where: str, error: Exception, says: str, advises: str
) -> None:
    model = LaunchingModel(recurrent=True)
    setattr(model, where, error)
    driver = Driver(model, running=1)
    channel = ScriptedChannel([[submit("runs", prompt(5), 5), submit("waits", prompt(6), 5)]], model.happened)
    fatal = serve(driver.engine, channel, 5.0)
    assert isinstance(fatal, wire.Fatal)
    assert channel.sent[-1] is fatal
    assert says in fatal.message
    assert fatal.next_step == advises
    failed = [message for message in channel.sent if isinstance(message, wire.Failed)]
    assert sorted(message.id for message in failed) == ["runs", "waits"]
    assert not any(message.overloaded for message in failed)


def test_the_process_ends_after_a_lost_device(tmp_path) -> None:
    """Its exit is what the front restarts it for (tests/api/test_engine_death.py)."""
    with EngineProcess(write_checkpoint(tmp_path)) as engine:
        engine.start()
        engine.submit("bad", [*prompt(3), LOSS], 5)
        said = engine.collect("bad")["bad"]
        assert "illegal memory access" in said[-1].message
        assert isinstance(engine.receive(), wire.Fatal)
        with pytest.raises(EOFError):
            engine.receive()
        engine.wait(5)
        assert engine.process.returncode == 1


def test_a_temperature_below_float32s_range_is_greedy() -> None:
    model = TinyModel(recurrent=False)
    result = Driver(model).one(prompt(5), 4, temperature=1e-46)
    assert result.tokens == model.greedy(prompt(5), 4)
    assert SamplingParams(1, temperature=1e-46).temperature > 0


def test_a_state_that_a_step_left_half_changed_is_not_kept() -> None:
    """Memory runs out within a prompt's second chunk, before any snapshot; against the model's own reference."""
    model = TinyModel(recurrent=True)
    for fails in range(1, 40, 3):
        driver = Driver(model, chunk=8)
        driver.submit("starves", prompt(13), 3)
        driver.step()
        starved = Starved(fails, torch.OutOfMemoryError("CUDA out of memory."))
        with starved:
            events = driver.engine.step()
        driver._take(events)
        assert driver.results["starves"].overloaded
        assert driver.one(prompt(13), 12).tokens == model.greedy(prompt(13), 12)
