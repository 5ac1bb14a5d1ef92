"""`ft show NAME --fit`: what a model needs of this machine, from its headers, here or on the Hub."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftlaunch.cli.output import Output

if TYPE_CHECKING:
    from ftlaunch.machine.probe import Asked
    from ftlaunch.machine.served import Entry
    from ftlaunch.machine.verdict import Finding

NEEDED = ("cpu", "limits", "gpu", "model")  # probes
STATS_SECONDS = 1.0
ATTEMPTS = 2  # to reach a Hub that can be done without
DRIVER_SECONDS = 6.0  # one that takes longer hangs, as `ft doctor` says then
TERMS = ("TERM", "FORMULA", "BYTES", "BANDWIDTH", "MS")


def show_fit(output: Output, name: str, explain: bool = False, flags: str = "") -> int:
    """Exit status, by the worst finding. explain: also the terms of the predicted times. flags: of `ft serve`.

    Raises FtError for a name that is nobody's model, and UsageError for flags that are none.
    """
    from ftlaunch.cli import findings
    from ftlaunch.machine.run import examine
    from ftlaunch.machine.verdict import EXIT, worst

    began = time.monotonic()
    _remember()
    with _model(output, name) as asked:
        config = _config(Path(asked.model or name), name, flags) if flags else None
        found = examine(replace(asked, config=config), only=NEEDED)
    told = findings.named([*_of_gpu(found), *(finding for finding in found if finding.group == "model")], name)
    if output.as_json:
        output.result("", findings.report(told, False, time.monotonic() - began))
    else:
        findings.show(output, told)
        if explain:
            _explain(output, told)
    return EXIT[worst(told)]


def _config(path: Path, name: str, flags: str) -> str:
    """The engine's configuration as JSON. Raises ConfigError for what `ft serve` would refuse for want of a GPU."""
    from ftengine.errors import ConfigError
    from ftengine.memory.gpu import choose_device, probe, refuse_without_gpu
    from ftlaunch.cli.flags import serve_options, words
    from ftlaunch.machine.software import torch_cuda
    from ftlaunch.servers.serve import engine_config

    options = serve_options(["--model", str(path), *words(flags, "changes nothing here")])
    config = engine_config(options, path)
    try:
        device = choose_device(config.device, probe(DRIVER_SECONDS), torch_cuda())
        if device.value == "cpu":
            refuse_without_gpu(config, "--device cpu was given" if config.device == "cpu" else device.reason)
    except ConfigError as error:
        step = f"ft show {shlex.quote(name)} --fit, without these flags; ft doctor tells of the GPU"
        raise ConfigError(f"ft serve would refuse: {error}", step) from error
    return config.to_json()


class BeforePull:
    """What is told of a model before it is fetched, and kept for the day when it has been served."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._entry: Entry | None = None

    def look(self, path: Path, size: int) -> list[str]:
        """Sentences. path: of a folder with headers; size: bytes to come, 0 for a name of the catalogue that is made
        here and known by bundled facts.
        """
        from ftlaunch.cli.findings import named
        from ftlaunch.machine.probe import Asked
        from ftlaunch.machine.run import examine
        from ftlaunch.machine.served import prediction

        asked = Asked(model=str(path), to_fetch=size, bundled=not size)  # a driver that slept has time to answer
        found = {finding.id: finding for finding in named(examine(asked, only=NEEDED), self._name)}
        self._entry = prediction({id: finding.data for id, finding in found.items()})
        return list(_told(found))

    def keep(self, path: Path) -> None:
        """path: where the model is now."""
        import msgspec

        from ftlaunch.machine.served import keep

        if self._entry is not None:
            keep(msgspec.structs.replace(self._entry, model=str(path.absolute())))


def _of_gpu(found: Iterable[Finding]) -> list[Finding]:
    """The one that would be used, or why none is: there is none, it cannot be used, or its driver hangs."""
    return [finding for finding in found if finding.id in ("gpu.answer", "gpu.use")]


def _told(found: dict[str, Finding]) -> Iterator[str]:
    for finding in _of_gpu(found.values()):
        text = f"GPU: {finding.value}" + (f"; {finding.cost}" if finding.cost else "")
        yield text + (f". Try: {finding.mend}" if finding.mend else "")
    for name in ("memory", "vram", "pinned", "files"):
        needed = found.get(f"model.{name}")
        if needed is not None and not needed.cost:  # else it is said below
            yield f"{needed.label[0].upper()}{needed.label[1:]}: {needed.value}"
    served, speed, context = (found.get(f"model.{name}") for name in ("strategy", "speed", "context"))
    if served is not None and context is not None:
        yield f"It would be served {served.value}; context {context.value}"
    if speed is not None and speed.data:
        yield f"Predicted: {speed.value}" + (f" ({speed.cost})" if speed.cost else "")
    for finding in found.values():
        if finding.group == "model" and finding.cost and finding is not speed:
            yield f"{finding.label}: {finding.value}; {finding.cost}. Try: {finding.mend}"


def _explain(output: Output, told: list[Finding]) -> None:
    data = next((finding.data for finding in told if finding.id == "model.speed"), {})
    for of, end in (("decode_terms", "a token"), ("prompt_terms", f"{data.get('prompt_tokens')} tokens")):
        terms = data.get(of)
        if not terms:
            continue
        total = sum(term["ms"]["likely"] for term in terms)
        rows = [[term["name"], term["formula"], *_amount(term), f"{term['ms']['likely']:.2f}"] for term in terms]
        output.say("")
        output.table(TERMS, [*rows, [end, "", "", "", f"{total:.2f}"]], None, "")
        output.lines(f"{term['name']}: {term['words']}" for term in terms if term["words"])
        output.say("")
        output.values({symbol: text for term in terms for symbol, text in term["legend"]}.items())
    if data:
        output.lines(["Where the formulas and their figures come from: docs/fit.md"])


def _amount(term: dict[str, Any]) -> tuple[str, str]:
    size, bandwidth = term["bytes"], term["bandwidth"]
    amount = "-" if size is None else f"{size / 1e6:,.0f} MB"
    return amount, "-" if bandwidth is None else f"{bandwidth / 1e9:,.1f} GB/s"


def _remember() -> None:
    """What servers that run have done until now."""
    from ftlaunch.machine.remember import remember
    from ftlaunch.servers import running
    from ftlaunch.servers.ask import ask

    for record in running():
        remember(record, ask(record, "/v1/stats", STATS_SECONDS))


@contextmanager
def _model(output: Output, name: str) -> Iterator[Asked]:
    """By its headers, here or from the Hub; by bundled facts where the Hub does not answer and there are such.

    Raises FtError.
    """
    from ftengine.errors import FtError
    from ftlaunch.machine.bundled import FACTS
    from ftlaunch.machine.probe import Asked
    from ftlaunch.store.find import find
    from ftlaunch.store.hub.errors import HubError
    from ftlaunch.store.hub.limits import from_environment
    from ftlaunch.store.hub.skeleton import skeleton
    from ftlaunch.store.names import hub_name

    meant = hub_name(name)
    try:
        path = find(name).path
    except FtError:
        if meant is None:  # nor does any Hub have it
            raise
    else:
        yield Asked(model=str(path))
        return
    output.say(f"{meant.shown} is not on this machine; its headers are fetched")
    limits = from_environment()
    if name in FACTS:  # somebody waits, and there is an answer without the Hub
        limits = replace(limits, attempts=ATTEMPTS)
    with ExitStack() as stack:
        try:
            found = stack.enter_context(skeleton(meant, output.say, limits))
        except HubError as error:
            if name not in FACTS:
                raise
            output.say(f"{error}; what ft knows of {name} by itself is told instead")
            asked = Asked(model=name, bundled=True)
        else:
            asked = Asked(model=str(found.path), to_fetch=found.bytes)
        yield asked
