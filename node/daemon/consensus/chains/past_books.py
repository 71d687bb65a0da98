"""The books of rounds that are final, apart from those that change with nearly every entry. Pure.

Of rounds at which epochs of our chain began books are kept for good: the epoch before may have decided them too.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from atoll.node.daemon.consensus.chains.epochs import Segment
from atoll.node.daemon.consensus.chains.looks import ChainLook
from atoll.protocols.ids import Digest, PeerId
from atoll.protocols.layered_map import put
from atoll.protocols.ledger.ballots import Book, has_votes
from atoll.protocols.remembered import remembered

_NO_ENTRIES = Book()


class PastBooks(msgspec.Struct, frozen=True, dict=True):
    """The books of final rounds, and what was found in them."""

    books: Mapping[int, Book] = msgspec.field(default_factory=dict)

    def put(self, number: int, book: Book) -> "PastBooks":
        """These with another book of a round. What was found in the others is kept."""
        after = PastBooks(put(self.books, number, book))
        vars(after).update(_ballots=self._ballots.but(number), _voted=self._voted.but(number))
        return after

    @remembered
    def _ballots(self) -> ChainLook[tuple[object, ...]]:
        return ChainLook()

    @remembered
    def _voted(self) -> ChainLook[bool]:
        return ChainLook()

    @remembered
    def contributors(self) -> tuple[tuple[int, frozenset[PeerId]], ...]:
        """Who contributed to each of the rounds."""
        return tuple((at, book.contributors) for at, book in self.books.items())

    @remembered
    def names(self) -> frozenset[Digest]:
        """The contributions to all of these rounds."""
        return frozenset().union(*(book.contributions for book in self.books.values()))

    def ballots(self, chain: Sequence[Segment], count: int) -> Mapping[int, tuple[object, ...]]:
        """By place in the chain, of its first `count`: what `ballots_before` tells, if that is anything."""

        def find(at: int) -> tuple[object, ...] | None:
            return ballots_before(chain, at, self.books) or None

        vars(self).update(_ballots=self._ballots.along(chain, count, find))
        return self._ballots.found

    def voted(self, chain: Sequence[Segment], count: int) -> Mapping[int, bool]:
        """Of these places those where the epoch before may have decided the round: a quorum of votes is here."""

        def find(at: int) -> bool | None:
            book = self.books.get(chain[at].first, _NO_ENTRIES).within(chain[at - 1].epoch)
            return has_votes(book, len(chain[at].electorate.voters)) or None

        vars(self).update(_voted=self._voted.along(chain, count, find))
        return self._voted.found


def ballots_before(chain: Sequence[Segment], at: int, books: Mapping[int, Book]) -> tuple[object, ...]:
    """All that may show that the epoch before the one at a place of the chain decided that one's first round."""
    book, before = books.get(chain[at].first, _NO_ENTRIES), chain[at - 1].epoch
    # Mostly that epoch has no ballots in the round. Contributions tell the authors of a set.
    if before not in book.epochs:
        return ()
    part = book.within(before)
    return part.votes, part.other_votes, part.proposals, part.in_proposals, part.reductions


class Books(Mapping[int, Book]):
    """By round: `past` up to round `final`, and `coming`. Nobody changes either."""

    __slots__ = ("coming", "final", "past")

    def __init__(self, final: int, past: PastBooks, coming: Mapping[int, Book]) -> None:
        self.final, self.past, self.coming = final, past, coming

    def __getitem__(self, number: int) -> Book:
        return self.coming[number] if number in self.coming else self.past.books[number]

    def __contains__(self, number: object) -> bool:
        return number in self.coming or number in self.past.books

    def __iter__(self) -> Iterator[int]:
        yield from self.past.books
        yield from self.coming

    def __len__(self) -> int:
        return len(self.past.books) + len(self.coming)

    def contributors(self) -> list[object]:
        """Who contributed to each of the rounds."""
        return [self.past.contributors, *((at, book.contributors) for at, book in self.coming.items())]

    def names(self) -> frozenset[Digest]:
        """The contributions to all of the rounds."""
        return self.past.names.union(*(book.contributions for book in self.coming.values()))

    def each(self, change: Callable[[Book], Book]) -> "Books":
        """These with each book changed."""
        past = {at: change(book) for at, book in self.past.books.items()}
        is_same = all(past[at] is book for at, book in self.past.books.items())
        coming = {at: change(book) for at, book in self.coming.items()}
        return Books(self.final, self.past if is_same else PastBooks(past), coming)

    def put(self, number: int, book: Book) -> "Books":
        """These with another book of a round."""
        if number <= self.final:
            return Books(self.final, self.past.put(number, book), self.coming)
        return Books(self.final, self.past, put(self.coming, number, book))

    def after(self, number: int, *, is_fork: bool) -> "Books":
        """These once the next round is final; `is_fork`: an epoch of our chain began there, so it is kept."""
        past = self.past.put(number, self.coming[number]) if is_fork and number in self.coming else self.past
        return Books(number, past, {at: book for at, book in self.coming.items() if at > number})


def parted(books: Mapping[int, Book], final: int) -> Books:
    """The books where all rounds up to `final` are final, and no later one."""
    if type(books) is Books and books.final == final:
        return books
    past = {at: book for at, book in books.items() if at <= final}
    return Books(final, PastBooks(past), {at: book for at, book in books.items() if at > final})
