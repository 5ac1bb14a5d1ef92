"""What the model wrote, kept so that it can be shown in the history exactly as it was generated.

Clients send an answer back changed: arguments re-serialised and with defaults added, ids rewritten, reasoning left out.
Rendered from that, a prompt would differ from what the model's cache holds as early as in its own last answer. So each
answer's tokens are kept with what they mean. An answer is a turn of the history if the client names an id that only it
was told, or if the whole conversation up to there is the one the answer was generated for; and if its values are the
turn's. One that only looks the same never is: the turn may have been shown in other tokens before, and what the client
did not send back, reasoning, may be another one's.

A turn that no id decides stays what it was first shown as, its own or the client's, whatever is generated later.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from ftengine.dialect.contexts import Place
from ftengine.dialect.prompt.turns import Turn, bare

ROOM = 64 << 20  # bytes
CANDIDATES = 32  # answers of one id, or of one look and context, that are compared, newest first
PLACES = 1 << 15  # of which it is kept what was shown there, each about 200 bytes
_JOINTS = ("\n", "", "\n\n")  # between visible texts that calls stood between, in one client or another
_CLIENTS = 0  # in place of a serial number: the turn was shown as the client sent it
_OVERHEAD = 1024  # bytes an answer takes besides what is in it


class Control(msgspec.Struct, frozen=True, array_like=True):
    """A control token in a turn: where, in tokens and in characters, from the turn's beginning."""

    token: int
    character: int
    content: str


class CallWritten(msgspec.Struct, frozen=True, array_like=True):
    id: str  # that the client was told, bare
    name: str
    arguments: dict[str, Any]


class Generated(msgspec.Struct, frozen=True, array_like=True):
    """One assistant turn, from the control token that opens it, which the prompt wrote, to the model's last token."""

    tokens: bytes  # int32, of this machine's byte order
    text: str  # what they spell
    controls: tuple[Control, ...]  # without the opening one and the one that ends the turn
    think_end: int  # which of `controls` ended the reasoning; -1: none
    stop: str  # the token that ended the turn, the last one; "": it was cut
    reasoning: str
    said: tuple[str, ...]  # visible text, cut where calls stand
    calls: tuple[CallWritten, ...]
    context: bytes  # digest of what stood before, see contexts.Place

    @property
    def size(self) -> int:
        """About as many bytes of memory."""
        arguments = sum(len(call.id) + len(call.name) + _weight(call.arguments) for call in self.calls)
        spoken = len(self.reasoning) + sum(map(len, self.said))
        return _OVERHEAD + len(self.tokens) + len(self.text) + 128 * len(self.controls) + spoken + arguments

    def text_as_in(self, turn: Turn) -> str | None:
        """The visible text in the form of the turn's, if it is this one; clients join its parts in different ways."""
        wanted = turn.text.strip()
        for joint in _JOINTS if len(self.said) > 1 else ("",):
            text = joint.join(self.said)
            if text.strip() == wanted:
                return text
        return None

    def matches(self, turn: Turn) -> bool:
        """Whether the turn says and calls the same. Reasoning may be missing, arguments may have got more members."""
        if len(turn.calls) != len(self.calls) or (turn.reasoning and turn.reasoning.strip() != self.reasoning.strip()):
            return False
        for call, written in zip(turn.calls, self.calls, strict=True):
            if call.name != written.name or not _holds(call.arguments, written.arguments):
                return False
        return self.text_as_in(turn) is not None

    def knows(self, turn: Turn) -> bool:
        """Whether a call of the turn has the id that the client was told, which no one else was."""
        return any(
            written.id and bare(call.id) == written.id for call, written in zip(turn.calls, self.calls, strict=True)
        )


class Generations:
    """Answers by their calls' ids and by their place. Bounded, least recently seen go first. Safe from threads."""

    def __init__(self, room: int = ROOM) -> None:
        self._room = room
        self._kept: OrderedDict[int, Generated] = OrderedDict()
        self._found_by: defaultdict[str | bytes, list[int]] = defaultdict(list)
        self._shown: OrderedDict[bytes, int] = OrderedDict()  # Place.within: serial number of the answer
        self._serial = 0
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Generated]:
        """As they were at this moment, least recently seen first."""
        with self._lock:
            return iter(list(self._kept.values()))

    def add(self, answer: Generated) -> None:
        """An answer too large for a quarter of the room is not kept."""
        if answer.size > self._room // 4:
            return
        with self._lock:
            self._serial += 1
            self._kept[self._serial] = answer
            self._bytes += answer.size
            for key in _keys_of(answer):
                self._found_by[key].append(self._serial)
            while self._bytes > self._room:
                self._drop(next(iter(self._kept)))

    def find(self, turn: Turn, place: Callable[[], Place]) -> Generated | None:
        """The answer that this turn of a history is; `place`: where it stands, asked for if no id decides."""
        for call in turn.calls:
            for serial, answer in self._candidates(bare(call.id)):
                if answer.matches(turn) and answer.knows(turn):
                    return self._seen(serial, answer)
        where = place()
        with self._lock:
            shown = self._shown.get(where.within)
            known = self._kept.get(shown) if shown else None
        if shown == _CLIENTS:
            serial, found = _CLIENTS, None
        elif shown and known is not None and known.matches(turn):
            serial, found = shown, known
        else:
            look = _look(where.before, [call.name for call in turn.calls], turn.text)
            same = ((serial, answer) for serial, answer in self._candidates(look) if answer.matches(turn))
            serial, found = next(same, (_CLIENTS, None))
        self._show(where.within, serial)
        return None if found is None else self._seen(serial, found)

    def _show(self, within: bytes, serial: int) -> None:
        with self._lock:
            self._shown[within] = serial
            self._shown.move_to_end(within)
            if len(self._shown) > PLACES:
                self._shown.popitem(last=False)

    def _candidates(self, key: str | bytes) -> list[tuple[int, Generated]]:
        """Newest first."""
        with self._lock:
            serials = self._found_by.get(key, ())[: -CANDIDATES - 1 : -1] if key else ()
            return [(serial, self._kept[serial]) for serial in serials]

    def _seen(self, serial: int, answer: Generated) -> Generated:
        with self._lock:
            if serial in self._kept:
                self._kept.move_to_end(serial)
        return answer

    def _drop(self, serial: int) -> None:
        answer = self._kept.pop(serial)
        self._bytes -= answer.size
        for key in _keys_of(answer):
            serials = self._found_by[key]
            serials.remove(serial)
            if not serials:
                del self._found_by[key]


def _keys_of(answer: Generated) -> set[str | bytes]:
    names = [call.name for call in answer.calls]
    keys: set[str | bytes] = {call.id for call in answer.calls if call.id}
    keys.update(_look(answer.context, names, joint.join(answer.said)) for joint in _JOINTS)
    return keys


def _look(context: bytes, names: list[str], text: str) -> bytes:
    seen = "\0".join((*names, text.strip())).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(context + seen, digest_size=16).digest()


def _holds(sent: Any, written: Any) -> bool:
    """Whether a JSON value is the written one, but for members that were added to objects."""
    if isinstance(written, dict):
        return isinstance(sent, dict) and all(
            key in sent and _holds(sent[key], value) for key, value in written.items()
        )
    if isinstance(written, list):
        return isinstance(sent, list) and len(sent) == len(written) and all(map(_holds, sent, written))
    return bool(sent == written) and isinstance(sent, bool) == isinstance(written, bool)


def _weight(value: Any) -> int:
    if isinstance(value, dict):
        return 64 + sum(len(key) + 64 + _weight(item) for key, item in value.items())
    if isinstance(value, list):
        return 64 + sum(map(_weight, value))
    return 64 + (len(value) if isinstance(value, str) else 0)
