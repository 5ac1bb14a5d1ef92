"""How much of a prompt the device has, and how a sequence gets it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ftengine.cache.node import Anchor, Node
from ftengine.cache.sessions import common_tokens
from ftengine.cache.store import DeviceStore
from ftengine.cache.tiers.base import TOKEN_BYTES


@dataclass(frozen=True)
class Match:
    """path: nodes whose pages are used as they are, the root left out; full: all that spell the prompt.

    anchor: whose state is gone on from; tail: tokens after the path's pages that are copied from page `donor`, which
    belongs to `anchor`, or to the node `owner`.
    """

    path: list[Node]
    full: list[Node]
    anchor: Anchor | None = None
    tail: int = 0
    donor: int = -1
    owner: Node | None = None

    def without_donor(self) -> Match:
        """Whole pages only."""
        return replace(self, tail=0, donor=-1, owner=None)


def match(store: DeviceStore, tokens: bytes, limit: int) -> Match:
    """The most of the first `limit` tokens that need not be computed."""
    full = store.tree.match(tokens, limit)
    if not store.recurrent:
        return _any_token(store, full, tokens, limit)
    anchor = store.tree.deepest_anchor(full, tokens, limit)
    if anchor is None:
        return Match([], full)
    tail = len(anchor.tail) // TOKEN_BYTES
    donor = store.storage.companion(anchor.slot) if tail else -1
    return Match(full[: anchor.node.depth], full, anchor, tail, donor)


def _any_token(store: DeviceStore, full: list[Node], tokens: bytes, limit: int) -> Match:
    """Without a state any page that begins alike will do, as far as it is alike."""
    node = full[-1] if full else store.tree.root
    start = node.depth * store.tree.page_size * TOKEN_BYTES
    rest = tokens[start : limit * TOKEN_BYTES][: store.tree.page_size * TOKEN_BYTES]
    best = Match(full, full)
    for child in node.children.values():
        if child.tokens[:TOKEN_BYTES] == rest[:TOKEN_BYTES]:
            tail = common_tokens(child.tokens, rest)
            if tail > best.tail:
                best = Match(full, full, None, tail, child.page, child)
    for anchor in node.anchors.values():
        tail = common_tokens(anchor.tail, rest)
        if tail > best.tail:
            best = Match(full, full, anchor, tail, store.storage.companion(anchor.slot))
    return best
