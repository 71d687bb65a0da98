"""What the ledger says about the finality of one round: who may decide, what was proposed, who voted for it.

Pure facts, in the order-independent form: a Book is the same whatever the order in which the entries of
different authors arrive.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from atoll.protocols.ids import Digest, PeerId, RunId, digest
from atoll.protocols.ledger.records import (
    Ack,
    Ballot,
    Body,
    Contribution,
    Prepare,
    Promise,
    Proposal,
    Reduction,
    Vote,
)


@dataclass(frozen=True, slots=True)
class Book:
    """All entries about one round. Ballots whose author does not own them never get in (see `owner_of`)."""

    contributions: Mapping[Digest, tuple[PeerId, Contribution]] = field(default_factory=dict)
    reductions: Mapping[Digest, PeerId] = field(default_factory=dict)
    """Authors by entry id; of contributions and of these a set may be made."""
    acks: Mapping[PeerId, Digest] = field(default_factory=dict)
    """Newest set digest that an author acknowledged."""
    prepares: Mapping[Ballot, Digest] = field(default_factory=dict)
    promises: Mapping[tuple[PeerId, Ballot], Promise] = field(default_factory=dict)
    proposals: Mapping[Digest, Proposal] = field(default_factory=dict)
    votes: Mapping[tuple[PeerId, Ballot], tuple[Digest, Vote]] = field(default_factory=dict)
    """First vote of an author in a ballot: a second one is equivocation and does not count."""

    def unknown(self, names: Iterable[Digest]) -> tuple[Digest, ...]:
        """Those of a set that are not here."""
        return tuple(e for e in names if e not in self.contributions and e not in self.reductions)

    def authors_of(self, names: Iterable[Digest]) -> set[PeerId]:
        """Who contributed to a set: they decide the next round."""
        return {self.contributions[name][0] for name in names if name in self.contributions}

    def is_void(self, proposal: Proposal) -> bool:
        """Does it name Reductions alone? Nobody would decide the next round, so it is never decided itself."""
        return not self.unknown(proposal.contributions) and not self.authors_of(proposal.contributions)

    def highest_vote(self, author: PeerId) -> tuple[Digest, Vote] | None:
        """An author's vote in its highest ballot."""
        own = [(ballot, found) for (who, ballot), found in self.votes.items() if who == author]
        return max(own, key=lambda item: item[0])[1] if own else None

    def promised(self, author: PeerId) -> Ballot | None:
        """The lowest ballot that an author may still vote in; None: any."""
        ballots = [b for who, b in self.promises if who == author] + [b for who, b in self.votes if who == author]
        return max(ballots, default=None)

    def firsts(self) -> dict[Ballot, tuple[Digest, Proposal]]:
        """The proposal of each ballot; of two (equivocation) the one with the lower entry id."""
        found: dict[Ballot, tuple[Digest, Proposal]] = {}
        for name, proposal in sorted(self.proposals.items()):
            found.setdefault(proposal.ballot, (name, proposal))
        return found

    def who_promised(self, acceptors: Iterable[PeerId], ballot: Ballot) -> set[PeerId]:
        """Those that answered a Prepare."""
        return {peer for peer in acceptors if (peer, ballot) in self.promises}

    def who_answered(self, acceptors: Iterable[PeerId], ballot: Ballot) -> set[PeerId]:
        """Those that promised a ballot, or voted in it."""
        return {peer for peer in acceptors if (peer, ballot) in self.promises or (peer, ballot) in self.votes}


def order(run: RunId, number: int, authors: Iterable[PeerId]) -> tuple[PeerId, ...]:
    """Acceptors of a round in the order of their ballots: by BLAKE3(run, round, peer)."""

    def rank(peer: PeerId) -> bytes:
        return digest(b"atoll/ballot/1\0", run, number.to_bytes(8, "little"), peer.encode())

    return tuple(sorted(set(authors), key=rank))


def quorum(count: int) -> int:
    """⌈2n/3⌉: any two quorums share more than a third."""
    return -(-2 * count // 3)


def owner_of(acceptors: tuple[PeerId, ...], attempt: int) -> PeerId:
    """Who may open the ballots of this attempt."""
    return acceptors[attempt % len(acceptors)]


def record(book: Book, entry: Digest, author: PeerId, body: Body) -> tuple[Book, str]:
    """The book with one more entry, and the reason when it does not count."""
    match body:
        case Contribution() if any(who == author for who, _ in book.contributions.values()):
            return book, ""  # the first in the feed counts: a later one cannot replace it
        case Reduction() if author in book.reductions.values():
            return book, ""
        case Contribution():
            return replace(book, contributions={**book.contributions, entry: (author, body)}), ""
        case Reduction():
            return replace(book, reductions={**book.reductions, entry: author}), ""
        case Ack():
            return replace(book, acks={**book.acks, author: body.members}), ""
        case Prepare() if body.ballot.proposer == author:
            return replace(book, prepares={**book.prepares, body.ballot: entry}), ""
        case Proposal() if body.ballot.proposer == author:
            return _propose(book, entry, body)
        case Promise():
            return replace(book, promises={**book.promises, (author, body.ballot): body}), ""
        case Vote():
            return _vote(book, entry, author, body)
        case Prepare() | Proposal():
            return book, "a ballot belongs to the peer that it names"
    return book, ""


def _propose(book: Book, entry: Digest, body: Proposal) -> tuple[Book, str]:
    other = next((name for name, p in book.proposals.items() if p.ballot == body.ballot and name != entry), None)
    fault = "two proposals in one ballot" if other is not None else ""
    return replace(book, proposals={**book.proposals, entry: body}), fault


def _vote(book: Book, entry: Digest, author: PeerId, body: Vote) -> tuple[Book, str]:
    known = book.votes.get((author, body.ballot))
    if known is not None:
        return book, "" if known[0] == entry else "two votes in one ballot"
    above = [b for who, b in book.promises if who == author and b > body.ballot]
    if above:
        return book, "a vote below its author's promise"
    return replace(book, votes={**book.votes, (author, body.ballot): (entry, body)}), ""


def bound_to(book: Book, acceptors: tuple[PeerId, ...], ballot: Ballot) -> tuple[Digest, ...] | None:
    """The proposals before `ballot` that a quorum may have voted for, of the newest ballot with any. Sorted.

    Empty: none can ever become final, and any set may be proposed. None: fewer than a quorum promised `ballot`, so
    that nothing is known. Whoever promised votes in no ballot before its promise any more, and what it voted
    stands before the promise in its feed: so votes that are not here can only come from who is silent.
    """
    needed, count = quorum(len(acceptors)), len(acceptors)
    if len(book.who_promised(acceptors, ballot)) < needed:
        return None
    found: dict[Ballot, list[Digest]] = {}
    votes = [vote for (peer, _), (_, vote) in book.votes.items() if peer in acceptors and vote.ballot < ballot]
    for (before, name), here in Counter((vote.ballot, vote.proposal) for vote in votes).items():
        if here < 2 * needed - count:
            continue  # the silent ones are fewer than a quorum lacks
        proposal = book.proposals.get(name)
        lawful = proposal is None or (proposal.ballot == before and _can_win(book, acceptors, proposal))
        if lawful and here + len(_silent(book, acceptors, before)) >= needed:
            found.setdefault(before, []).append(name)
    return tuple(sorted(found[max(found)])) if found else ()


def _silent(book: Book, acceptors: tuple[PeerId, ...], ballot: Ballot) -> set[PeerId]:
    """Those that may still vote in a ballot."""
    gone = {peer for peer, later in book.promises if later > ballot}
    return {peer for peer in acceptors if peer not in gone and (peer, ballot) not in book.votes}


def _can_win(book: Book, acceptors: tuple[PeerId, ...], proposal: Proposal) -> bool:
    return owner_of(acceptors, proposal.ballot.attempt) == proposal.ballot.proposer and not book.is_void(proposal)


def decided(book: Book, acceptors: tuple[PeerId, ...]) -> tuple[Digest, Proposal] | None:
    """The proposal that a quorum of acceptors voted for in its ballot; None while there is none."""
    for entry, proposal in sorted(book.proposals.items()):
        if not _can_win(book, acceptors, proposal):
            continue
        votes = [book.votes.get((peer, proposal.ballot)) for peer in acceptors]
        if sum(vote is not None and vote[1].proposal == entry for vote in votes) >= quorum(len(acceptors)):
            return entry, proposal
    return None
