"""The epochs that a node had entered before a restart. Pure."""

from collections.abc import Iterable

from atoll.node.daemon.consensus.chains.epochs import EpochBook, add_entry, add_orphan
from atoll.protocols.ids import PeerId
from atoll.protocols.ledger.records import Body, Epoch, Follow, Leave

_CHOOSING = frozenset([Epoch, Follow, Leave])


def chosen_path(
    entries: Iterable[tuple[PeerId, Body]], me: PeerId, orphans: Iterable[tuple[PeerId, Body]] = ()
) -> tuple[Epoch, ...]:
    """The epochs that `me` entered before a restart, in order, from all entries by author, each feed in order.

    `orphans`: those of equivocators that no feed here holds.
    """
    book = EpochBook()
    for author, body in entries:
        if type(body) in _CHOOSING:  # of the others nothing is asked here, and they are nearly all
            book = add_entry(book, author, body)
    for author, body in orphans:
        book = add_orphan(book, author, body) if isinstance(body, Epoch) else book
    # What it signed last may wait for others still: then it was where that begins.
    paths = (book.path(name) for name in book.ancestors(book.choice(me)))
    return tuple(book.bodies[name] for name in next(filter(None, paths), ()))
