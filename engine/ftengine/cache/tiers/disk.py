"""The disk tier: one file a record, in one folder for each identity, under one budget for all of them. Torch-free.

Several servers may use a folder. Who writes or makes room holds the folder's lock file, and its number tells whether
another one did so since; names that came or went are looked at then. Readers need no lock: a file is whole under its
name, and one that is gone is a record less.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ftengine.cache.tiers import format as record_format
from ftengine.cache.tiers.arena import Bytes
from ftengine.cache.tiers.base import TOKEN_BYTES
from ftengine.cache.tiers.books import BREATH_SECONDS, EVERYTHING, Books, Value, Victims
from ftengine.cache.tiers.files import NO_FILE, TEMPORARY, Entry, Folder
from ftengine.cache.tiers.format import NAME, BadRecord, Header, Orphan, content_bytes, decode, encode, file_name
from ftengine.cache.tiers.hashing import CHUNK_BYTES, ROOT_KEY
from ftengine.cache.tiers.identity import KEY_FILE, Identity, compare, key_folders, read_identity
from ftengine.cache.tiers.lock import FolderLock
from ftengine.cache.tiers.records import Anchor, Chunk, Copy, Record
from ftengine.cache.value import Worth

log = logging.getLogger(__name__)

READ_BYTES = 8 << 20  # at a time: hashed while it is still in the processor's caches
FILES_A_BREATH = 16
MOST_REASONS = 8  # of records left out that are logged one by one
OLDEST_AGE = 365 * 86400.0  # of a record's last use, in seconds; more tells no more
SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)  # of something, this machine is: no file's fault


@dataclass
class _Other:
    """Another identity's folder.

    modified: of the folder, in nanoseconds; used: when a server last began with it, in seconds since the epoch
    """

    modified: int
    used: float
    size: int
    entries: list[Entry]  # records, the shallowest first: the others hang on them


class DiskTier:
    def __init__(self, root: Path, identity: Identity, books: Books, budget: int) -> None:
        """Raises OSError where the folder cannot be used."""
        self.identity = identity
        self.budget = budget
        self.books = books
        self._key = identity.key
        self._path = root
        self._opened = contextlib.ExitStack()  # closes what `_open_folders` opened
        self._open_folders()
        self._others: dict[str, _Other] = {}
        self._modified = -1
        self._extra = 0  # bytes of files that are no records: the identity in clear
        self._reasons = 0
        self._doomed: set[str] = set()
        self._unread: set[bytes] = set()  # keys of records that could not be read when that was last tried
        books.unlink = self._unlink

    @property
    def path(self) -> Path:
        return self._folder.path

    @property
    def used(self) -> int:
        """Bytes in the folder, of all identities."""
        others = list(self._others.values())  # at once: another thread's folders come and go meanwhile
        return self.books.disk_used + self._extra + sum(other.size for other in others)

    def load(self) -> None:
        """Reads the headers of all records; what is found can be restored at once."""
        with self._lock.held(patience=1.0):
            self._look_around()
            self._make_room(0, EVERYTHING, self.books.victims())
        reasons = {reason for name in self._others if (reason := self._why_other(name))}
        for reason in sorted(reasons):
            log.info("prompts kept in %s are not used: %s", self._root.path, reason)

    def read(self, record: Record, tokens: Bytes | None, state: Bytes | None) -> None:
        """Fills both parts. Raises BadRecord, OSError; FileNotFoundError if someone removed it."""
        name = file_name(record)
        try:
            fd = self._folder.open(name)
        except OSError as error:
            if error.errno not in NO_FILE:
                raise
            raise BadRecord("something else bears its name") from None
        try:
            opened = self._open(fd, name)
            digest, offset = hashlib.sha256(), opened.begin
            for part in (tokens, state):
                if part is not None:
                    offset = _read_into(fd, part, offset, digest.update)
        finally:
            os.close(fd)
        if digest.digest() != opened.header.sha256:
            raise BadRecord("its content is damaged")
        if opened.header.tokens != record.tokens:
            raise BadRecord("it holds other tokens")
        self._unread.discard(record.key)
        self.books.disk.read += offset - opened.begin

    def write(self, record: Record, copy: Copy, victims: Victims) -> bool:
        """False: there is no room for something of its value. Raises OSError, ENOSPC if the disk is full."""
        parts = [self.books.arena.bytes_of(block).data for block in copy.blocks()]
        lasting = isinstance(record, Anchor) and record.lasting
        start = encode(record, self._key, parts, lasting=lasting)
        size = len(start) + sum(part.nbytes for part in parts)
        if self._folder.is_gone():  # `ft cache clear`, or another server that needed the room
            self._open_folders()
        with self._lock.held(patience=30.0) as changed:
            if changed or self._folder.modified() != self._modified:
                self._look_around()
            if record.disk or not all(chunk.disk for chunk in record.path()):
                return True  # another server wrote it, or removed what has to be there first
            if not self._make_room(size, victims.value(record), victims):
                return False
            if self._folder.free() < size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._folder.path))
            name = file_name(record)
            self._folder.write(name, [memoryview(start), *parts])
            self._modified = self._folder.modified()
            self._folder.touch(name, self._epoch(record.worth.last_used))
        self.books.written(record, size)
        self.books.disk.written += size
        return True

    def touch(self, record: Record) -> None:
        """It was used now."""
        if record.disk:
            self._folder.touch(file_name(record), time.time())

    def doom(self, records: list[Record]) -> None:
        """They left the books, and their files are not to come back; `bury` removes them."""
        self._doomed |= {file_name(record) for record in records}

    def bury(self) -> None:
        for name in list(self._doomed):
            with contextlib.suppress(OSError):
                self._folder.remove(name)
            self._doomed.discard(name)

    def vanished(self) -> None:
        """A file was removed by someone else: what is gone with it leaves the books."""
        there = set() if self._folder.is_gone() else {entry.name for entry in self._folder.entries()}
        with self.books.lock:
            for record in list(self.books.index.by_key.values()):
                if record.disk and file_name(record) not in there:
                    self.books.drop_disk(record)

    def unreadable(self, record: Record, error: OSError) -> bool:
        """It could not be read. That may pass, and then its file is as good as before; but what is not the machine's
        want and comes twice in a row is the file's own, and counts as damage. Returns whether it is given up."""
        reason, passing = error.strerror or error, error.errno in SHORT
        if record.key in self._unread and not passing:
            self._unread.discard(record.key)
            self.remove_damaged(record, reason)
            return True
        if not passing:
            self._unread.add(record.key)
        self._say(file_name(record), f"{reason}; its file stays")
        return False

    def remove_damaged(self, record: Record, reason: object) -> None:
        self._say(file_name(record), reason)
        self.books.disk.failures += 1
        self.books.drop(record)

    def close(self) -> None:
        self._opened.close()

    # What is there

    def _open_folders(self) -> None:
        """In place of those that were open. Raises OSError, with nothing changed."""
        with contextlib.ExitStack() as opened:
            root = opened.enter_context(contextlib.closing(Folder.at(self._path)))
            lock = opened.enter_context(contextlib.closing(FolderLock(root)))
            folder = opened.enter_context(contextlib.closing(root.child(self._key, make=True)))
            self._tell_identity(folder)
            before, self._opened = self._opened, opened.pop_all()
        self._root, self._lock, self._folder = root, lock, folder
        before.close()

    def _tell_identity(self, folder: Folder) -> None:
        content = self.identity.encode()
        with contextlib.suppress(OSError):
            if folder.read(KEY_FILE, 2 * len(content)) == content:
                folder.touch(KEY_FILE, time.time())  # tells other servers that this one was used
                return
        folder.write(KEY_FILE, [memoryview(content)])

    def _look_around(self) -> None:
        """Held: the folder's lock. Brings the books to what lies in the folders now."""
        self._modified = self._folder.modified()
        entries = sorted(self._folder.entries(), key=lambda entry: entry.name)  # by position: parents come first
        known = {file_name(record): record for record in list(self.books.index.by_key.values()) if record.disk}
        self._extra = sum(entry.size for entry in entries if entry.name == KEY_FILE)
        for number, entry in enumerate(entries):
            if number % FILES_A_BREATH == 0:
                time.sleep(BREATH_SECONDS)
            if entry.name == KEY_FILE or entry.name in self._doomed or known.pop(entry.name, None) is not None:
                continue
            self._adopt(entry)
        for record in known.values():
            self.books.drop_disk(record)
        names = [name for name in key_folders(self._root) if name != self._key]
        self._others = {name: other for name in names if (other := self._look_at(name)) is not None}

    def _adopt(self, entry: Entry) -> None:
        """A file that is not in the books: into them, or off the disk."""
        try:
            if not NAME.fullmatch(entry.name):
                raise BadRecord("it was never finished" if entry.name.startswith(TEMPORARY) else "it is no record")
            fd = self._folder.open(entry.name)
            try:
                header = self._open(fd, entry.name).header
            finally:
                os.close(fd)
            self._insert(header, entry)
        except FileNotFoundError:
            pass
        except Orphan as error:
            self._folder.remove(entry.name)
            log.info("the kept prompt %s is not used: %s", self._folder.path / entry.name, error)
        except BadRecord as error:
            self._folder.remove(entry.name)
            if not entry.name.startswith(TEMPORARY):
                self._say(entry.name, error)
                self.books.disk.failures += 1
        except OSError as error:
            self._say(entry.name, error.strerror)

    def _insert(self, header: Header, entry: Entry) -> None:
        books = self.books
        with books.lock:
            record = books.index.by_key.get(header.key)
            if record is not None:
                books.written(record, entry.size)
                return
            parent = books.index.root if header.parent == ROOT_KEY else books.index.by_key.get(header.parent)
            if not isinstance(parent, Chunk) or parent.end + len(header.tokens) // TOKEN_BYTES != header.position:
                raise Orphan("what comes before it is missing")
            record = self._record(header, parent, entry)
            record.disk = entry.size
            books.attach(record, None, write=False)

    def _record(self, header: Header, parent: Chunk, entry: Entry) -> Record:
        worth = Worth(
            kind=header.kind,
            session=header.session,
            side=header.side,
            last_used=time.monotonic() - min(max(0.0, time.time() - entry.modified), OLDEST_AGE),
            uses=header.uses,
            saved=header.saved,
            bytes=header.content,
            position=header.position,
        )
        if content_bytes(0, self.books.shape) == 0 and not header.tokens:
            raise BadRecord("it is empty")
        if len(header.tokens) == CHUNK_BYTES:
            return Chunk(header.key, parent, header.tokens, worth)
        return Anchor(header.key, parent, header.tokens, worth, lasting=header.lasting, born=worth.last_used)

    def _open(self, fd: int, name: str) -> record_format.Opened:
        start = os.pread(fd, record_format.START.size + record_format.MAX_HEADER, 0)
        return decode(start, name, os.fstat(fd).st_size, self._key, self.books.shape)

    def _look_at(self, name: str) -> _Other | None:
        before = self._others.get(name)
        try:
            folder = self._root.child(name)
        except OSError:
            return None
        with contextlib.closing(folder):
            modified = folder.modified()
            if before is not None and before.modified == modified:
                return before
            entries = folder.entries()
        used = max((entry.modified for entry in entries if entry.name == KEY_FILE), default=0.0)
        records = sorted((entry for entry in entries if entry.name != KEY_FILE), key=lambda entry: entry.name)
        return _Other(modified, used, sum(entry.size for entry in entries), records)

    def _why_other(self, name: str) -> str:
        with (
            contextlib.suppress(OSError, msgspec.MsgspecError),
            contextlib.closing(self._root.child(name)) as folder,
        ):
            return compare(read_identity(folder), self.identity)
        return ""

    # What goes

    def _make_room(self, size: int, value: Value, victims: Victims) -> bool:
        """Held: the folder's lock."""
        if size + self._extra > self.budget:
            return False
        for name, other in sorted(self._others.items(), key=lambda item: item[1].used):
            if self.used + size <= self.budget:
                return True
            self._shorten(name, other, self.used + size - self.budget)
        if self.used + size > self.budget:
            for victim in victims.of_disk(value):
                with self.books.lock:
                    if victim.attached and victim.disk and not victim.holds:
                        self.books.drop_disk(victim)
                        self.books.disk.evictions += 1
                if self.used + size <= self.budget:
                    break
        self._modified = self._folder.modified()
        return self.used + size <= self.budget

    def _shorten(self, name: str, other: _Other, excess: int) -> None:
        """Frees so many bytes of another identity's folder, or all that it has."""
        with contextlib.suppress(OSError), contextlib.closing(self._root.child(name)) as folder:
            while excess > 0 and other.entries:
                entry = other.entries.pop()
                folder.remove(entry.name)
                other.size -= entry.size
                excess -= entry.size
                self.books.disk.evictions += 1
            if not other.entries:
                folder.remove(KEY_FILE)
                self._root.remove_folder(name)
                del self._others[name]

    def _unlink(self, record: Record) -> None:
        try:
            self._folder.remove(file_name(record))
        except OSError as error:
            log.warning("%s cannot be removed: %s", self._folder.path / file_name(record), error.strerror)

    def _say(self, name: str, reason: object) -> None:
        self._reasons += 1
        if self._reasons <= MOST_REASONS:
            log.warning("the kept prompt %s is not used: %s", self._folder.path / name, reason)
        elif self._reasons == MOST_REASONS + 1:
            log.warning("more kept prompts in %s are not used; the log names no more of them", self._folder.path)

    def _epoch(self, moment: float) -> float:
        return time.time() - (time.monotonic() - moment)


def _read_into(fd: int, part: Bytes, offset: int, seen: object) -> int:
    """Fills the part from the file; the offset after it."""
    view = part.data
    while view.nbytes:
        count = os.preadv(fd, [view[:READ_BYTES]], offset)
        if count == 0:
            raise BadRecord("it is cut short")
        assert callable(seen)
        seen(view[:count])
        view, offset = view[count:], offset + count
    return offset
