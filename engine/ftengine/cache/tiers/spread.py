"""Which anchors go to disk though others follow them in the same conversation: so few that each is needed to leave no
more than SPACING tokens between one that the disk has, or will have, and the next.

What the host tier gives up is then either there, too, or close behind something that is. Torch-free.
"""

from __future__ import annotations

from itertools import pairwise

from ftengine.cache.captures import SPACING
from ftengine.cache.tiers.books import Books
from ftengine.cache.tiers.records import Anchor


def spread(books: Books, last: Anchor, tokens: bytes) -> None:
    """Held: the books' lock. Wants those written of the anchors before `last`, whose path `tokens` is.

    From one that is to be on disk it goes on to the farthest within reach; where two are farther apart than that, to
    the nearest. What the disk has refused by value is not offered again.
    """
    near: list[Anchor] = [last]
    reached = 0
    for anchor in books.index.along(tokens, last):
        if anchor.disk or anchor.lasting or anchor.between:
            reached = anchor.end
            break
        if not anchor.worth.side:
            near.append(anchor)
    for anchor, following in pairwise(reversed(near)):
        if following.end - reached > SPACING:
            anchor.between = True
            anchor.worth.saved = max(anchor.worth.saved, anchor.end - reached)
            books.want(anchor)
            reached = anchor.end
