"""Where paths of tokens lead to records: a tree of chunks, with anchors at their places. Torch-free.

Changed under the tiers' lock. `walk` and `find` take no lock, so that the step loop never waits: they read single
entries of dicts and tuples that are replaced whole, and what they find may be gone when it is used.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from ftengine.cache.tiers.base import CHUNK_TOKENS, TOKEN_BYTES, TierName
from ftengine.cache.tiers.hashing import CHUNK_BYTES, common_tokens
from ftengine.cache.tiers.records import Anchor, Chunk, Record, is_chunk, root
from ftengine.cache.tiers.shape import RecordShape
from ftengine.core import BoundaryKind


@dataclass(frozen=True)
class Place:
    """Where a path can be restored to: all of `chunks`, from the path's start, then what is needed of `last`."""

    tokens: int
    chunks: list[Chunk]
    last: Record | None

    @property
    def kind(self) -> BoundaryKind | None:
        return self.last.worth.kind if isinstance(self.last, Anchor) else None

    def records(self, start: int) -> list[Record]:
        """That a restore reads if the first `start` tokens are in place; the last one first: it fails soonest."""
        needed: list[Record] = [] if self.last is None else [self.last]
        return [*needed, *self.chunks[start // CHUNK_TOKENS :]]

    def tier(self, start: int) -> TierName:
        return "host" if all(record.host is not None for record in self.records(start)) else "disk"


class Index:
    def __init__(self, shape: RecordShape) -> None:
        self.stateful = shape.state_bytes > 0
        self.root = root()
        self.by_key: dict[bytes, Record] = {}

    def walk(self, tokens: bytes) -> list[Chunk]:
        """The known chunks at the start of a path."""
        path: list[Chunk] = []
        children = self.root.children
        for begin in range(0, len(tokens) - CHUNK_BYTES + 1, CHUNK_BYTES):
            chunk = children.get(tokens[begin : begin + CHUNK_BYTES])
            if chunk is None:
                break
            path.append(chunk)
            children = chunk.children
        return path

    def find(self, tokens: bytes, limit: int, above: int) -> Place | None:
        """The deepest place in tokens[:limit] that is deeper than `above` tokens."""
        tokens = tokens[: limit * TOKEN_BYTES]
        path = self.walk(tokens)
        place = self._anchor(tokens, path, above) if self.stateful else self._any_token(tokens, path)
        return place if place is not None and place.tokens > above else None

    def attach(self, record: Record) -> None:
        """Into the tree, below its parent, which is there."""
        parent = record.parent
        assert parent is not None, "a record without a parent"
        assert parent.attached, "a record below one that is gone"
        if isinstance(record, Anchor):
            parent.anchors[record.tokens] = record
            parent.lengths = tuple(sorted({len(tail) for tail in parent.anchors}, reverse=True))
        else:
            assert isinstance(record, Chunk)
            parent.children[record.tokens] = record
        record.attached = True
        self.by_key[record.key] = record
        self._order(parent)

    def detach(self, record: Record) -> list[Record]:
        """Out of the tree with everything below it, which is returned, the record first."""
        parent = record.parent
        assert parent is not None, "the root stays"
        if isinstance(record, Anchor):
            del parent.anchors[record.tokens]
            parent.lengths = tuple(sorted({len(tail) for tail in parent.anchors}, reverse=True))
        else:
            del parent.children[record.tokens]
        self._order(parent)
        gone = list(subtree(record))
        for each in gone:
            each.attached = False
            del self.by_key[each.key]
        return gone

    def along(self, tokens: bytes, last: Anchor) -> Iterator[Anchor]:
        """The anchors before `last` on its path, which `tokens` is, the deepest first."""
        node = last.parent
        while node is not None:
            begin = node.end * TOKEN_BYTES
            for length in node.lengths:
                anchor = node.anchors.get(tokens[begin : begin + length]) if begin + length <= len(tokens) else None
                if anchor is not None and anchor.end < last.end:
                    yield anchor
            node = node.parent

    def covered(self, record: Record) -> bool:
        """Whether another record has all that this one has: a tail whose tokens are the beginning of another's, where
        there are no states."""
        if self.stateful or not isinstance(record, Anchor) or record.parent is None:
            return False
        return self.contains(record.parent, record.tokens, but=record)

    def contains(self, parent: Chunk, tail: bytes, but: Record | None = None) -> bool:
        """Whether the beginning of a record below `parent`, other than `but`, is this tail."""
        return any(other is not but and other.tokens.startswith(tail) for other in parent.below())

    def _order(self, parent: Chunk) -> None:
        if not self.stateful:
            parent.ordered = tuple(sorted(((each.tokens, each) for each in parent.below()), key=lambda item: item[0]))

    def _anchor(self, tokens: bytes, path: list[Chunk], above: int) -> Place | None:
        for depth in range(len(path), -1, -1):
            if CHUNK_TOKENS * (depth + 1) <= above:
                return None
            node = path[depth - 1] if depth else self.root
            rest = tokens[depth * CHUNK_BYTES : (depth + 1) * CHUNK_BYTES]
            for length in node.lengths:
                anchor = node.anchors.get(rest[:length]) if length <= len(rest) else None
                if anchor is not None:
                    return Place(anchor.end, path[:depth], anchor)
        return None

    def _any_token(self, tokens: bytes, path: list[Chunk]) -> Place:
        """Whatever shares the longest beginning with the rest is its neighbour in order."""
        node = path[-1] if path else self.root
        rest = tokens[len(path) * CHUNK_BYTES : (len(path) + 1) * CHUNK_BYTES]
        ordered = node.ordered
        position = bisect_left(ordered, rest, key=lambda item: item[0])
        best, last = 0, None
        for own, record in ordered[max(0, position - 1) : position + 1]:
            common = common_tokens(own, rest)
            if common > best:
                best, last = common, record
        return Place(len(path) * CHUNK_TOKENS + best, path, last)


def subtree(record: Record) -> Iterator[Record]:
    """The record and everything below it, parents before children."""
    waiting = [record]
    while waiting:
        each = waiting.pop()
        yield each
        if isinstance(each, Chunk):
            waiting += each.below()


def check_tree(index: Index) -> None:
    """Raises AssertionError if what is in the tree and what is known by key differ, or a record hangs on nothing."""
    records = [record for record in subtree(index.root) if record.parent is not None]
    assert len(records) == len(index.by_key), "a record is lost"
    for record in records:
        assert index.by_key.get(record.key) is record, "a record is known by another key"
        assert record.attached, "a record in the tree counts as gone"
        assert record.present, "a record in the tree lies nowhere"
        assert is_chunk(record) == isinstance(record, Chunk), "a record of the wrong kind"
