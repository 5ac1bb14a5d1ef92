"""`ft bench bw`: both lanes of missing experts, measured in a process of its own that may hang or crash. Torch-free."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import msgspec

from ftengine.errors import ConfigError, FtError
from ftengine.experts.profile import LaneProfile
from ftengine.formats.format import FORMATS, ExpertLayout
from ftengine.kernels import native
from ftengine.locks import locked
from ftlaunch import paths
from ftlaunch.machine import process

PATIENCE = 90.0  # seconds without news: the first time kernels are compiled, some ten seconds at once
REAP_SECONDS = 1.0  # that a killed process may take to end; inside a driver's call it may never
DEFAULT = "qwen3.6-35b-a3b-nvfp4"  # whose shape is measured where there is no model

Show = Callable[[str, float], None]
Say = Callable[[str], None]


class Expert(msgspec.Struct, frozen=True):
    """A layout by its formats' names."""

    hidden: int
    intermediate: int
    gate_up: str
    down: str
    bias: bool = False


class Asked(msgspec.Struct, frozen=True):
    """device: "cuda" or "cpu". threads: None for as many as `ft serve` takes."""

    layouts: list[Expert]
    device: str
    threads: int | None = None
    fresh: bool = False

    def layout(self, number: int) -> ExpertLayout:
        one = self.layouts[number]
        return ExpertLayout(one.hidden, one.intermediate, FORMATS[one.gate_up], FORMATS[one.down], one.bias)

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @staticmethod
    def from_json(text: str) -> Asked:
        return msgspec.json.decode(text, type=Asked)


class Shown(msgspec.Struct, frozen=True, tag="shown"):
    stage: str
    fraction: float


class Said(msgspec.Struct, frozen=True, tag="said"):
    text: str


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    sentence: str
    next_step: str = ""


class Result(msgspec.Struct, frozen=True, tag="result"):
    """now: it was measured, else found. kept, link: why the profile is not kept, and why it has no link; else empty."""

    profile: LaneProfile
    now: bool
    kept: str = ""
    link: str = ""


Event = Shown | Said | Failed | Result
Events = queue.Queue[Event | int]


class Experts(msgspec.Struct, frozen=True):
    """whose: in words."""

    whose: str
    layouts: list[Expert]


def experts_of(model: str | None, formats: Sequence[str]) -> Experts:
    """Of a model, else of the first in the store that has routed experts, else of a well-known shape.

    formats: instead of the model's own. Raises FtError.
    """
    whose, layout = _model(model) if model is not None else _stored() or _well_known()
    if not formats:
        return Experts(whose, [_expert(layout, layout.gate_up.name, layout.down.name)])
    return Experts(whose, [_expert(layout, name, name) for name in dict.fromkeys(formats)])


def _expert(layout: ExpertLayout, gate_up: str, down: str) -> Expert:
    return Expert(layout.hidden, layout.intermediate, gate_up, down, layout.bias)


def _model(name: str) -> tuple[str, ExpertLayout]:
    from ftlaunch.machine.fit import read
    from ftlaunch.store import resolve

    layout = read(resolve(name)).layout
    if layout is None:
        raise FtError(f"{name} has no routed experts: there is nothing to divide between link and CPU", "ft bench cpu")
    return name, layout


def _stored() -> tuple[str, ExpertLayout] | None:
    """Of the model that was served last; of one that never was, the largest."""
    from ftlaunch.machine.fit import read
    from ftlaunch.store.listing import installed
    from ftlaunch.store.names import weights_path

    for model in sorted(installed(), key=lambda one: (one.last_used or 0.0, one.bytes), reverse=True):
        try:
            layout = read(weights_path(model.path)).layout
        except FtError:
            continue  # damaged, or of a kind that is not served: `ft list` tells
        if layout is not None:
            return model.name, layout
    return None


def _well_known() -> tuple[str, ExpertLayout]:
    from ftlaunch.machine import bundled

    layout = bundled.model(DEFAULT).layout
    assert layout is not None
    return "Qwen3.6-35B-A3B", layout


def measure(asked: Asked, show: Show, say: Say, patience: float = PATIENCE) -> list[Result]:
    """One result a layout. Raises FtError for what is refused, hangs or breaks. Nothing goes on running afterwards."""
    if not native.AVAILABLE:
        raise ConfigError(f"there is nothing to measure: {native.REASON}", "pip install --force-reinstall ftlaunch")
    found: list[Result] = []
    with _turn(say), _child(asked) as events:
        stage = "starting"
        while not isinstance(event := _next(events, patience, stage), int):
            if isinstance(event, Shown):
                stage = event.stage
                show(event.stage, event.fraction)
            elif isinstance(event, Said):
                say(_sentence(event.text))
            elif isinstance(event, Failed):
                raise FtError(event.sentence, event.next_step)
            else:
                found.append(event)
    if len(found) < len(asked.layouts):
        raise _died(event, stage)
    return found


def _died(status: int, stage: str) -> FtError:
    what = f"what measured ended with status {status} while: {stage}"
    if status == -signal.SIGKILL:
        return FtError(f"{what}; the system may have wanted its memory", "close other programs")
    return FtError(what, "FT_DEBUG=1 ft bench bw, which shows what it said")


def _next(events: Events, patience: float, stage: str) -> Event | int:
    try:
        return events.get(timeout=patience)
    except queue.Empty:
        hangs = f"no news for {patience:g} s while: {stage}"
        raise FtError(hangs, "ft doctor, which tells whether the GPU's driver hangs") from None


@contextmanager
def _turn(say: Say) -> Iterator[None]:
    """One measurement at a time: two would each take the other's part of the memory's bandwidth, and keep that."""
    with ExitStack() as stack:
        try:
            stack.enter_context(
                locked(paths.run() / "bench-bw.lock", lambda: say("Another ft bench bw measures: waiting."))
            )
        except OSError:
            pass  # nowhere to write: nothing will be kept either
        yield


@contextmanager
def _child(asked: Asked) -> Iterator[Events]:
    """Events of the process as they come; its status is the last. It is killed at the end of the block."""
    try:
        child = process.start("ftlaunch.bench.bandwidth_child", asked.to_json())
    except OSError as error:
        raise FtError(f"no process can be started: {error.strerror}", "close other programs") from error
    events: Events = queue.Queue()

    def listen() -> None:
        assert child.stdout is not None
        with child.stdout as lines:
            for line in lines:
                try:
                    events.put(msgspec.json.decode(line, type=Event))
                except msgspec.MsgspecError:
                    pass  # a line cut short
        events.put(child.wait())

    listener = threading.Thread(target=listen, name="bandwidth", daemon=True)
    listener.start()
    try:
        yield events
    finally:
        if listener.is_alive():
            process.end(child)
            listener.join(REAP_SECONDS)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
