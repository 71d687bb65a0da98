"""Ballots that may count later: of rounds that are not decided yet, and of epochs that decide nothing here. Pure.

Nobody knows who decides those, so anybody may write of them, also of epochs that are made up. They wait by author
and nothing looks at them. When a round or an epoch begins, the ballots of its voters enter the round's book, each
feed in order: the book is the same as if they came then. No number of them is too many, because a cap would count
other ballots on a node that is behind; the ledger's shares bound what an author writes.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypeAlias

from atoll.node.daemon.consensus.chains.epochs import Segment
from atoll.node.daemon.consensus.chains.looks import places_at
from atoll.node.daemon.consensus.chains.past_books import Books
from atoll.protocols.ids import Digest, PeerId
from atoll.protocols.layered_map import plain, put
from atoll.protocols.ledger.ballots import Book, add_entry, add_orphan
from atoll.protocols.ledger.records import BallotBody

Waiting: TypeAlias = Mapping[int, Mapping[PeerId, Mapping[Digest, tuple[BallotBody, bool]]]]
"""By round, author and entry: the ballot, and whether its author had left when it wrote it."""
Fault: TypeAlias = tuple[PeerId, Digest, str]
"""Author and id of an entry that does not count, and the reason."""
_NO_ENTRIES = Book()


def may_count(
    chain: Sequence[Segment], voters: Collection[PeerId], deciding: int, author: PeerId, body: BallotBody
) -> bool:
    """Whether the author is a voter of the ballot's round and epoch, and these are decided here, or were."""
    number, epoch = body.round, body.ballot.epoch
    if number >= deciding and epoch == chain[-1].epoch:
        return number == deciding and author in voters
    # Of other epochs only this is looked at where one began: whether the one before it decided that round, too.
    places = (at for at in places_at(chain, number) if chain[at - 1].epoch == epoch)
    return any(author in chain[at].electorate.voters for at in places)


def is_early(chain: Sequence[Segment], deciding: int, body: BallotBody) -> bool:
    """Whether it may count in a later round or epoch: everybody may be a voter there still."""
    return body.round > deciding or (body.round == deciding and body.ballot.epoch != chain[-1].epoch)


def wait(waiting: Waiting, entry: Digest, author: PeerId, body: BallotBody, *, has_left: bool) -> Waiting:
    """The ballots that wait, with one more: the newest of its author's feed."""
    there = waiting.get(body.round, {})
    given = there.get(author, {})
    if entry in given:
        return waiting  # a feed that was pruned comes again: what its author wrote before it left stays so
    return put(waiting, body.round, put(there, author, put(given, entry, (body, has_left))))


def admit(
    books: Books, waiting: Waiting, number: int, epoch: bytes, voters: Collection[PeerId]
) -> tuple[Books, list[Fault]]:
    """The books with what the voters of a round that begins in this epoch wrote early, and what does not count."""
    early = waiting.get(number, {})
    book = before = books.get(number, _NO_ENTRIES)
    faults: list[Fault] = []
    for author in early.keys() & voters:
        for entry, (body, has_left) in early[author].items():
            if body.ballot.epoch != epoch:
                continue
            if has_left:  # only votes wait then: they count if their author has two histories
                book = add_orphan(book, entry, author, body)
                continue
            book, fault = add_entry(book, entry, author, body)
            faults += [(author, entry, fault)] if fault else []
    return books if book is before else books.put(number, book), faults


def without_early(waiting: Waiting, author: PeerId) -> Waiting:
    """The ballots that wait, without those of one author."""
    left = plain(waiting)
    # A flood of authors comes and goes each minute: rounds in which this one wrote nothing are not copied.
    for at in [at for at, there in left.items() if author in there]:
        others = plain(left.pop(at))
        del others[author]
        if others:
            left[at] = others
    return left


def after(waiting: Waiting, number: int) -> Iterator[tuple[Digest, BallotBody]]:
    """The ballots that wait about later rounds than this one, with their entry ids."""
    for at, there in waiting.items():
        if at > number:
            yield from ((name, body) for given in there.values() for name, (body, _) in given.items())
