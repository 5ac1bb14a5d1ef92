"""A repository of the Hub, or one GGUF file of it, into the store."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from ftengine.errors import FtError
from ftlaunch.store import hf_cache, manifest
from ftlaunch.store.catalogue import CATALOGUE, short_name
from ftlaunch.store.events import Observer, Planned, Said, Stage
from ftlaunch.store.filenames import clash
from ftlaunch.store.files import sha256
from ftlaunch.store.fit import judge
from ftlaunch.store.hub.digest import Digest
from ftlaunch.store.hub.errors import HubError
from ftlaunch.store.hub.headers import weigh
from ftlaunch.store.hub.limits import BLOCK, Limits, from_environment
from ftlaunch.store.hub.part import arrived
from ftlaunch.store.hub.ranges import Source
from ftlaunch.store.hub.reader import Reader
from ftlaunch.store.hub.repository import RemoteFile, Repository, is_offline, look_up, token
from ftlaunch.store.hub.selection import choose
from ftlaunch.store.hub.skeleton import lay_out
from ftlaunch.store.hub.transfer import Transfer
from ftlaunch.store.machine import this_machine
from ftlaunch.store.names import HubName, weights_path
from ftlaunch.store.place import Place, place
from ftlaunch.store.wishes import Pulled, Wishes, ask, check_disk

CONFIG = "config.json"
MAX_CONFIG = 16 << 20


def fetch(typed: str, meant: HubName, wishes: Wishes, observe: Observer, limits: Limits | None = None) -> Pulled:
    """Raises FtError with what to do; what has arrived by then is kept for the next pull."""
    limits = limits or from_environment()
    if is_offline():
        return _offline(typed, meant, wishes, observe)
    repository = look_up(meant.repo, meant.revision or "main", limits, lambda text: observe(Said(text)))
    source = Source(repository, token(), limits)
    with closing(Reader(source, lambda text: observe(Said(text)))) as reader:
        files = choose(repository, wishes.files, meant.gguf, reader.whole)
        meant = _as_found(meant, files)
        return _Fetch(typed, meant, wishes, observe, source, files).run(reader)


def _as_found(meant: HubName, files: list[RemoteFile]) -> HubName:
    """A repository's only GGUF model goes by the name of its file."""
    clashing = clash(file.path.rpartition("/")[2] for file in files)
    if clashing is not None:
        raise HubError(f"{meant.repo} holds two files named {clashing}", "a narrower --files")
    gguf = next((file.path for file in files if file.path.lower().endswith(".gguf")), "")
    return HubName(meant.repo, gguf, meant.revision)


def _offline(typed: str, meant: HubName, wishes: Wishes, observe: Observer) -> Pulled:
    from ftlaunch.store.names import resolve

    try:
        found = resolve(typed)
    except FtError:
        raise FtError(
            f"{typed} is not on this machine, and HF_HUB_OFFLINE is set, so the Hub is not asked",
            f"HF_HUB_OFFLINE=0 ft pull {typed}",
        ) from None
    if wishes.to is not None or wishes.files:
        raise FtError("--to and --files need the Hub, and HF_HUB_OFFLINE is set", f"ft serve --model {typed}")
    observe(Said("HF_HUB_OFFLINE is set: the Hub is not asked for a newer revision"))
    return Pulled(meant.shown, found, fetched=False)


class _Fetch:
    """One pull, with what is known once the files are chosen."""

    def __init__(
        self,
        typed: str,
        meant: HubName,
        wishes: Wishes,
        observe: Observer,
        source: Source,
        files: list[RemoteFile],
    ) -> None:
        self._typed = typed
        self._meant = meant
        self._wishes = wishes
        self._observe = observe
        self._source = source
        self._repository: Repository = source.repository
        self._files = files
        self._contents = {file.key: file for file in files}
        self._command = f"ft pull {typed}"

    def run(self, reader: Reader) -> Pulled:
        name = self._meant.shown
        wait: Callable[[], None] = lambda: self._observe(Said(f"Waiting for another ft that fetches {name}"))  # noqa: E731
        with place(self._meant.folder, self._wishes.to, wait) as here:
            if self._is_here(here.final):
                here.forget()
                return Pulled(name, weights_path(here.final), fetched=False)
            cached = self._cached()
            if cached is not None:
                here.forget()
                self._observe(Said(f"{name} lies in the Hugging Face cache and is used from there"))
                return Pulled(name, cached, fetched=False)
            here.keep(set(self._contents))
            self._take_over(here)
            try:
                self._bring(here, reader)
            except BaseException:
                if not any(here.work.size(k) or arrived(here.work, k, f.size) for k, f in self._contents.items()):
                    here.forget()
                raise
            return Pulled(name, weights_path(here.final), fetched=True)

    def _is_here(self, directory: Path) -> bool:
        """By its record, then by every byte: what `ft verify` finds damaged, the next pull repairs."""
        written = manifest.read(directory)
        if written is None or written.source.revision != self._repository.commit:
            return False
        wanted = {file.path.rpartition("/")[2]: file for file in self._files}
        if written.files.keys() != wanted.keys():
            return False
        same = (not wanted[n].sha256 or wanted[n].sha256 == record.sha256 for n, record in written.files.items())
        if not all(same) or any(_size(directory / n) != record.size for n, record in written.files.items()):
            return False
        self._observe(Said(f"{self._meant.shown} is here; checking its files"))
        return all(self._fits(_opened(directory / name), file) for name, file in wanted.items())

    def _cached(self) -> Path | None:
        """The Hugging Face cache's copy, when it has every chosen file and each fits its hash."""
        if self._wishes.to is not None or self._meant.gguf:
            return None
        snapshot = hf_cache.find(self._meant.repo, self._repository.commit)
        if snapshot is None or any(_size(snapshot / file.path) != file.size for file in self._files):
            return None
        for file in self._files:
            if not self._fits(_opened(snapshot / file.path), file):
                self._observe(Said(f"{snapshot / file.path} is damaged; the Hugging Face cache is not used"))
                return None
        return snapshot

    def _fits(self, fd: int, file: RemoteFile) -> bool:
        digest, done = Digest(file), 0
        with os.fdopen(fd, "rb") as stream:
            while block := stream.read(BLOCK):
                digest.update(block)
                done += len(block)
                self._observe(Stage(f"Checking {file.path}, which is here already", done / max(1, file.size)))
        return digest.fits()

    def _take_over(self, here: Place) -> None:
        """Files of the model that is there and that stay the same: of another revision, or of a damaged model."""
        if here.final.is_symlink() or not here.final.is_dir():
            return
        with here.root.child(here.final.name) as old:
            for file in self._files:
                name = file.path.rpartition("/")[2]
                known = here.work.size(file.key) is not None or old.size(name) != file.size
                if not known and self._fits(old.open(name, os.O_RDONLY), file):
                    old.link(name, here.work, file.key)

    def _bring(self, here: Place, reader: Reader) -> None:
        missing = [file for file in self._contents.values() if here.work.size(file.key) != file.size]
        total = sum(file.size for file in self._contents.values())
        to_come = sum(file.size - arrived(here.work, file.key, file.size) for file in missing)
        self._observe(Planned(self._meant.shown, self._repository.commit, len(self._files), total, total - to_come))
        status = os.fstatvfs(here.root.fd)
        check_disk(here.root.path, status.f_bavail * status.f_frsize, to_come)
        ask(self._wishes, self._concerns(reader), self._command)
        transfer = Transfer(self._source, here.work, missing, self._observe, self._command)
        with closing(transfer):
            self._install(here, transfer.run())

    def _concerns(self, reader: Reader) -> list[str]:
        """Why a person may not want this model after all."""
        concerns = []
        short = short_name(self._meant.repo)
        architecture = self._architecture(reader)
        if short is not None and not CATALOGUE[short].served:
            concerns.append(f"{short} is not served by ft yet")
        elif architecture and not _is_served(architecture):
            concerns.append(f"its architecture {architecture} is not served by ft yet")
        say: Callable[[str], None] = lambda text: self._observe(Said(text))  # noqa: E731
        with TemporaryDirectory(prefix="ft-") as name:
            if not self._meant.gguf:  # the header of such a file may be as large as all others of a model together
                path = lay_out(self._source, self._files, reader, Path(name), say)
            fit = judge(weigh(Path(name), self._files, self._repository.name), this_machine())
            if fit.fits:
                say(f"{fit.text[:1].upper()}{fit.text[1:]}")
            else:
                concerns.append(fit.text)
            if not self._meant.gguf:
                for text in self._wishes.look(path, sum(file.size for file in self._files)):
                    say(text)
        return concerns

    def _architecture(self, reader: Reader) -> str:
        """As config.json names it; empty where there is none, which is GGUF's case."""
        config = next((file for file in self._files if file.path == CONFIG and file.size <= MAX_CONFIG), None)
        if config is None:
            return ""
        try:
            named = msgspec.json.decode(reader.whole(config))["architectures"][0]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError, TypeError):
            raise HubError(f"config.json of {self._meant.repo} names no architecture", "ft list") from None
        return str(named)[:100]

    def _install(self, here: Place, hashes: dict[str, str]) -> None:
        files = {}
        for file in self._files:
            known = hashes.get(file.key) or file.sha256 or sha256(here.work.as_path() / file.key)
            files[file.path] = (file.key, manifest.File(file.size, known))
        kind: manifest.Kind = "gguf" if self._meant.gguf else "hub"
        repository = self._repository
        here.finish(manifest.Source(kind, self._meant.shown, repository.commit, repository.requested), files)


def _is_served(architecture: str) -> bool:
    from ftengine.models.base import ARCHITECTURES

    return architecture in ARCHITECTURES or bool(os.environ.get("FT_PLUGINS"))


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
