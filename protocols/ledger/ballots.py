"""The ledger's facts about the finality of one round: voters, ballots, proposals, promises and votes. Pure.

A Book is the same in whatever order the entries of different authors arrive.
"""

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from operator import attrgetter
from typing import cast, get_args

import msgspec
from msgspec.structs import replace

from atoll.protocols.ids import Digest, PeerId, RunId, digest
from atoll.protocols.layered_map import put
from atoll.protocols.ledger import records
from atoll.protocols.ledger.probation import Tally
from atoll.protocols.remembered import remembered

_BALLOTS = frozenset(get_args(records.BallotBody))
BALLOTS_KEPT = 4096
"""Ballots of one author in one round and epoch that count: the first ones in its feed.

All nodes count the same: of other epochs each has entered some, and at another place in the feed.
"""
PROPOSALS_KEPT = 64
"""Of these, proposals. An honest owner makes another one only after a quorum promised and did not vote."""
PREPARES_KEPT = 16
"""Prepares of one author in one round and epoch: the highest, because nobody promises a lower one afterwards."""

ANSWERS_KEPT = 4
"""Answers of `decided_proposal` that a book remembers."""


class Book(msgspec.Struct, frozen=True, dict=True):
    """Entries about one round, of several epochs. Prepares and Proposals in another peer's ballot never get in."""

    contributions: Mapping[Digest, tuple[PeerId, records.Contribution]] = msgspec.field(default_factory=dict)
    """Author and body by entry id."""
    contributors: frozenset[PeerId] = frozenset()
    """The authors of `contributions`."""
    reductions: Mapping[Digest, PeerId] = msgspec.field(default_factory=dict)
    """Author by entry id. A set names contributions and Reductions."""
    acks: Mapping[PeerId, Digest] = msgspec.field(default_factory=dict)
    """Newest set digest that an author acknowledged."""
    prepares: Mapping[records.Ballot, Digest] = msgspec.field(default_factory=dict)
    """Entry id of the Prepare that opened a ballot."""
    promises: Mapping[records.Ballot, Mapping[PeerId, records.Promise]] = msgspec.field(default_factory=dict)
    """Promises by ballot and author."""
    highest: Mapping[tuple[PeerId, bytes], records.Ballot] = msgspec.field(default_factory=dict)
    """The highest promise of each author in each epoch."""
    proposals: Mapping[Digest, records.Proposal] = msgspec.field(default_factory=dict)
    """Proposals by entry id."""
    votes: Mapping[records.Ballot, Mapping[PeerId, tuple[Digest, records.Vote]]] = msgspec.field(
        default_factory=dict
    )
    """By ballot, the first vote of each author: a second one is equivocation and does not count."""
    epochs: frozenset[bytes] = frozenset()
    """The epochs of all ballots that were seen."""
    written: Mapping[tuple[PeerId, bytes], int] = msgspec.field(default_factory=dict)
    """Ballots of each author in each epoch that were seen, up to BALLOTS_KEPT."""
    orphans: frozenset[Digest] = frozenset()
    """Contributions, Reductions and proposals that no feed here holds (`add_orphan`)."""
    bound: tuple[Tally, Collection[PeerId]] | None = None
    """The sets before the round, and its voters, in a run that bounds the newcomers of a set (`bounded`)."""
    other_votes: Mapping[tuple[PeerId, records.Ballot, Digest], Digest] = msgspec.field(default_factory=dict)
    """Votes that count for equivocators only: of a history that is not here, second ones, below a promise.

    Entry id by author, ballot and proposal.
    """

    def author_of(self, name: Digest) -> PeerId | None:
        """The author of a contribution or Reduction; None where it is unknown."""
        return self.contributions[name][0] if name in self.contributions else self.reductions.get(name)

    def within(self, epoch: bytes) -> "Book":
        """The book with the ballots of one epoch only: its voters' ballots elsewhere do not bind them in it."""
        if not self.epochs or (len(self.epochs) == 1 and epoch in self.epochs):
            return self
        if epoch not in self._parts:
            self._parts[epoch] = replace(
                self,
                prepares={at: entry for at, entry in self.prepares.items() if at.epoch == epoch},
                promises={at: found for at, found in self.promises.items() if at.epoch == epoch},
                proposals={entry: found for entry, found in self.proposals.items() if found.ballot.epoch == epoch},
                votes={at: found for at, found in self.votes.items() if at.epoch == epoch},
                other_votes={key: entry for key, entry in self.other_votes.items() if key[1].epoch == epoch},
            )
        return self._parts[epoch]

    def bounded(self, tally: Tally, voters: Collection[PeerId]) -> "Book":
        """The book in which no proposal counts that names too many newcomers, by the tally before the round."""
        if not tally.newcomers:
            return self
        if self._bounded is None or self._bounded.bound != (tally, voters):
            vars(self)["_bounded"] = replace(self, bound=(tally, voters))
        return self._bounded or self

    @remembered
    def _bounded(self) -> "Book | None":
        """What `bounded` found last."""
        return None

    @remembered
    def _over(self) -> dict[tuple[Digest, ...], bool]:
        """Whether a set names too many newcomers, of those whose entries are all here."""
        return {}

    def is_over(self, names: tuple[Digest, ...]) -> bool:
        """Whether a set names more newcomers than it may; False as long as one of its entries is not here."""
        if self.bound is None or self.unknown(names):
            return False
        if names not in self._over:
            tally, voters = self.bound
            self._over[names] = tally.is_over(self.authors_of(names), voters)
        return self._over[names]

    @remembered
    def named(self) -> dict[tuple[object, ...], tuple[tuple[Digest, ...], ...]]:
        """What orphans.py found named in this book, by the voters and equivocators. Changes no action."""
        return {}

    @remembered
    def in_proposals(self) -> frozenset[Digest]:
        """The contributions here that proposals name."""
        named = (proposal.contributions for proposal in self.proposals.values())
        return frozenset[Digest]().union(*named) & self.contributions.keys()

    @remembered
    def decided(self) -> dict[tuple[object, ...], tuple[Digest, records.Proposal] | None]:
        """What `decided_proposal` found of some voters: forks ask at nearly every vote, of rounds long over."""
        return {}

    @remembered
    def _parts(self) -> dict[bytes, "Book"]:
        """What `within` found of each epoch."""
        return {}

    def unknown(self, names: Iterable[Digest]) -> tuple[Digest, ...]:
        """The entry ids of a set whose entries are not here."""
        return tuple(e for e in names if e not in self.contributions and e not in self.reductions)

    def authors_of(self, names: Iterable[Digest]) -> set[PeerId]:
        """The authors of a set's contributions: they are the voters of the next round."""
        return {self.contributions[name][0] for name in names if name in self.contributions}

    def is_void(self, proposal: records.Proposal) -> bool:
        """Whether it names Reductions alone, or too many newcomers: it is never decided."""
        # The next round would have no voters, or a flood would cost everybody what it likes.
        names = proposal.contributions
        is_empty = all(name in self.reductions and name not in self.contributions for name in names)
        return is_empty or self.is_over(names)

    def highest_vote(self, author: PeerId) -> tuple[Digest, records.Vote] | None:
        """An author's vote in its highest ballot."""
        newest = max((ballot for ballot, given in self.votes.items() if author in given), default=None)
        return None if newest is None else self.votes[newest][author]

    def promised(self, author: PeerId) -> records.Ballot | None:
        """The lowest ballot that an author may still vote in; None: any."""
        # A vote binds like a promise: an author never goes back to a lower ballot.
        answers = (*self.promises.items(), *self.votes.items())
        return max((ballot for ballot, given in answers if author in given), default=None)

    def first_proposals(self) -> dict[records.Ballot, tuple[Digest, records.Proposal]]:
        """The proposal of each ballot; of two (equivocation) the one with the lower entry id."""
        found: dict[records.Ballot, tuple[Digest, records.Proposal]] = {}
        for name, proposal in sorted(self.proposals.items()):
            found.setdefault(proposal.ballot, (name, proposal))
        return found

    def promised_by(self, voters: Iterable[PeerId], ballot: records.Ballot) -> set[PeerId]:
        """The voters that promised a ballot."""
        return self.promises.get(ballot, {}).keys() & voters

    def answered_by(self, voters: Iterable[PeerId], ballot: records.Ballot) -> set[PeerId]:
        """The voters that promised a ballot, or voted in it."""
        return self.promised_by(voters, ballot) | self.voted_in(voters, ballot)

    def answers(self, voters: Collection[PeerId], ballot: records.Ballot) -> int:
        """How many voters answered a ballot; where no third of them can have, perhaps more than did."""
        given = len(self.promises.get(ballot, ())) + len(self.votes.get(ballot, ()))
        return given if 3 * given <= len(voters) else len(self.answered_by(voters, ballot))

    def voted_in(self, voters: Iterable[PeerId], ballot: records.Ballot) -> set[PeerId]:
        """The voters that voted in a ballot."""
        return self.votes.get(ballot, {}).keys() & voters


def voter_order(run: RunId, number: int, authors: Iterable[PeerId]) -> tuple[PeerId, ...]:
    """Voters of a round in the order of their ballots: by BLAKE3(run, round, peer)."""
    return _ordered(run, number, frozenset(authors))


@lru_cache(maxsize=64)
def _ordered(run: RunId, number: int, authors: frozenset[PeerId]) -> tuple[PeerId, ...]:
    # A hash, so that every node finds the same order by itself, and another peer is the first in each round.
    # Nodes of one process, as in the simulator and in tests, ask for the same one in turn.

    def rank(peer: PeerId) -> bytes:
        return digest(b"atoll/ballot/1\0", run, number.to_bytes(8, "little"), peer.encode())

    # One text for each voter: a thousand rounds remember theirs, and each record brings its author's name anew.
    return tuple(PeerId(sys.intern(peer)) for peer in sorted(authors, key=rank))


def quorum(count: int) -> int:
    """The number of votes that makes a set final: ⌈2n/3⌉ of n voters."""
    # Two quorums share 2⌈2n/3⌉ − n ≥ n/3 voters. Two sets of one round could be final only if all of these lied,
    # so fewer than a third of liars never achieve it. A larger quorum would let fewer silent voters stop finality.
    return -(-2 * count // 3)


def is_quorum(electorate: tuple[PeerId, ...], present: Iterable[PeerId]) -> bool:
    """Whether those present can decide a round of this electorate."""
    return len(frozenset(present).intersection(electorate)) >= quorum(len(electorate))


but_acks = attrgetter(*(n for n in Book.__struct_fields__ if n not in ("acks", "written", "highest")))
"""All of a book but its acks: what deciding depends on. While these are the same, so is what was decided."""


def owner_of(voters: tuple[PeerId, ...], attempt: int) -> PeerId:
    """The voter that may open the ballots of this attempt."""
    return voters[attempt % len(voters)]


def add_entry(book: Book, entry: Digest, author: PeerId, body: records.Body) -> tuple[Book, str]:
    """The book with one more entry, and the reason why the entry does not count; empty where it does."""
    if type(body) not in _BALLOTS:
        return _with_entry(book, entry, author, body)
    epoch = cast(records.BallotBody, body).ballot.epoch
    seen = book.written.get((author, epoch), 0)
    if seen >= BALLOTS_KEPT:
        return book, ""
    after, fault = _with_entry(book, entry, author, body)
    if after is book:
        return after, fault
    epochs = book.epochs if epoch in book.epochs else book.epochs | {epoch}
    return replace(after, written=put(book.written, (author, epoch), seen + 1), epochs=epochs), fault


def _with_entry(book: Book, entry: Digest, author: PeerId, body: records.Body) -> tuple[Book, str]:
    match body:
        case records.Ack():
            return replace(book, acks={**book.acks, author: body.members}), ""
        case records.Vote():  # here, because most ballots are votes
            return _vote(book, entry, author, body)
        case records.Contribution() if author in book.contributors:
            return book, ""  # the first in the feed counts, and all nodes see one feed in one order
        case records.Reduction() if author in book.reductions.values():
            return book, ""
        case records.Contribution():
            return _contribute(book, entry, author, body), ""
        case records.Reduction():
            return replace(book, reductions={**book.reductions, entry: author}), ""
        case records.Prepare() if body.ballot.proposer == author:
            return _prepare(book, entry, body.ballot), ""
        case records.Proposal() if body.ballot.proposer == author:
            return _propose(book, entry, body)
        case records.Promise():
            return _promise(book, author, body), ""
        case records.Prepare() | records.Proposal():
            return book, "a ballot belongs to the peer that it names"
    return book, ""


def add_orphan(book: Book, entry: Digest, author: PeerId, body: records.Body) -> Book:
    """The book with an entry of an equivocator's other history.

    It may be what a final set names, what others voted for, or the vote that made it final. It binds nobody here:
    what its author promised and voted in the feed that this node holds stays as it is.
    """
    match body:
        case records.Contribution() if entry not in book.contributions:
            return replace(_contribute(book, entry, author, body), orphans=book.orphans | {entry})
        case records.Reduction() if entry not in book.reductions:
            return replace(book, reductions={**book.reductions, entry: author}, orphans=book.orphans | {entry})
        case records.Proposal() if body.ballot.proposer == author and entry not in book.proposals:
            proposals = {**book.proposals, entry: body}
            epochs = book.epochs | {body.ballot.epoch}
            return replace(book, proposals=proposals, orphans=book.orphans | {entry}, epochs=epochs)
        case records.Vote() if (seen := book.written.get((author, body.ballot.epoch), 0)) < BALLOTS_KEPT:
            book = _with_other(book, entry, author, body)
            written = put(book.written, (author, body.ballot.epoch), seen + 1)
            return replace(book, epochs=book.epochs | {body.ballot.epoch}, written=written)
    return book


def without(book: Book, author: PeerId, held: Collection[Digest]) -> Book:
    """The book without an author's contributions that are not held and that no proposal names."""
    if author not in book.contributors:
        return book
    gone = {entry for entry, (who, _) in book.contributions.items() if who == author} - {*held}
    gone -= {name for proposal in book.proposals.values() for name in proposal.contributions}
    if not gone:
        return book
    left = {entry: found for entry, found in book.contributions.items() if entry not in gone}
    return replace(book, contributions=left, contributors=frozenset(who for who, _ in left.values()))


def without_orphans(book: Book, author: PeerId) -> Book:
    """The book without the ack and the other votes of an author that decides nothing: it has no other ballots."""
    if author in book.acks:
        book = replace(book, acks={who: members for who, members in book.acks.items() if who != author})
    if not any(who == author for who, _ in book.written):
        return book
    return replace(
        book,
        other_votes={key: entry for key, entry in book.other_votes.items() if key[0] != author},
        written={key: many for key, many in book.written.items() if key[0] != author},
    )


def _contribute(book: Book, entry: Digest, author: PeerId, body: records.Contribution) -> Book:
    contributions = {**book.contributions, entry: (author, body)}
    return replace(book, contributions=contributions, contributors=book.contributors | {author})


def _prepare(book: Book, entry: Digest, ballot: records.Ballot) -> Book:
    of = ballot.proposer, ballot.epoch  # attempts begin again at 0 in the next epoch
    ours = [at for at in book.prepares if (at.proposer, at.epoch) == of]
    prepares = {**book.prepares, ballot: entry}
    if len(ours) >= PREPARES_KEPT:
        del prepares[min(*ours, ballot)]
    return replace(book, prepares=prepares)


def _propose(book: Book, entry: Digest, body: records.Proposal) -> tuple[Book, str]:
    of = body.ballot.proposer, body.ballot.epoch
    ours = [(name, p) for name, p in book.proposals.items() if (p.ballot.proposer, p.ballot.epoch) == of]
    if len(ours) >= PROPOSALS_KEPT and entry not in book.proposals:
        return book, ""
    other = next((name for name, p in ours if p.ballot == body.ballot and name != entry), None)
    fault = "two proposals in one ballot" if other is not None else ""
    return replace(book, proposals={**book.proposals, entry: body}), fault


def _promise(book: Book, author: PeerId, body: records.Promise) -> Book:
    of, ballot = (author, body.ballot.epoch), body.ballot
    promises = put(book.promises, ballot, {**book.promises.get(ballot, {}), author: body})
    # A liar may promise thousands of ballots, and each of its votes looks for the highest one.
    highest = put(book.highest, of, max(ballot, book.highest.get(of, ballot)))
    return replace(book, promises=promises, highest=highest)


def _vote(book: Book, entry: Digest, author: PeerId, body: records.Vote) -> tuple[Book, str]:
    ballot = body.ballot
    known = book.votes.get(ballot, {}).get(author)
    if known is not None and known[0] == entry:
        return book, ""
    # A vote below its author's promise would break what a quorum of promises showed to a later proposer.
    above = book.highest.get((author, ballot.epoch), ballot) > ballot
    if known is None and not above:
        given = {**book.votes.get(ballot, {}), author: (entry, body)}
        return replace(book, votes=put(book.votes, ballot, given)), ""
    other = _with_other(book, entry, author, body)
    return other, "a vote below its author's promise" if known is None else "two votes in one ballot"


def _with_other(book: Book, entry: Digest, author: PeerId, body: records.Vote) -> Book:
    key = author, body.ballot, body.proposal  # of one that was written twice, the first entry stays
    return replace(book, other_votes=put(book.other_votes, key, book.other_votes.get(key, entry)))


def bound_proposals(
    book: Book, voters: tuple[PeerId, ...], ballot: records.Ballot, equivocators: frozenset[PeerId] = frozenset()
) -> tuple[Digest, ...] | None:
    """The proposals before `ballot` that a quorum may have voted for, of the newest ballot with any; sorted.

    Empty: none can ever become final, and any set may be proposed. None: fewer than a quorum promised `ballot`, so
    that nothing is known. `equivocators`: authors with two histories, who may have voted for anything elsewhere.
    """
    # A voter that promised votes in no ballot before its promise any more, and its earlier votes stand before the
    # promise in its feed. So votes that are not here can only come from voters that are silent: a proposal whose
    # votes and silent voters together are no quorum is lost for ever.
    # An equivocator's promise shows nothing: its votes may stand in the history that is not here.
    needed, count = quorum(len(voters)), len(voters)
    sure = tuple(peer for peer in voters if peer not in equivocators)
    anywhere = count - len(sure)
    if len(book.promised_by(sure, ballot)) < needed:
        return None
    found: dict[records.Ballot, list[Digest]] = {}
    older = {at: given for at, given in book.votes.items() if at < ballot}
    for (before, name), here in named_by(older, {*sure}).items():
        if here + anywhere < 2 * needed - count:
            continue  # the voters without a promise are at most count − needed: too few for what it lacks
        proposal = book.proposals.get(name)
        lawful = proposal is None or (proposal.ballot == before and _can_win(book, voters, proposal))
        if lawful and here + len(_silent(book, sure, before)) + anywhere >= needed:
            found.setdefault(before, []).append(name)
    return tuple(sorted(found[max(found)])) if found else ()


def _silent(book: Book, voters: tuple[PeerId, ...], ballot: records.Ballot) -> set[PeerId]:
    """The voters that may still vote in a ballot."""
    later = [given.keys() for at, given in book.promises.items() if at > ballot]
    return {*voters}.difference(book.votes.get(ballot, ()), *later)


def named_by(
    votes: Mapping[records.Ballot, Mapping[PeerId, tuple[Digest, records.Vote]]], voters: Collection[PeerId]
) -> Counter[tuple[records.Ballot, Digest]]:
    """How many of the voters voted for each proposal in each ballot."""
    return Counter(
        (ballot, vote.proposal)
        for ballot, given in votes.items()
        for peer, (_, vote) in given.items()
        if peer in voters
    )


def _can_win(book: Book, voters: tuple[PeerId, ...], proposal: records.Proposal) -> bool:
    """Whether the proposal stands in a ballot of its owner and names contributions."""
    return owner_of(voters, proposal.ballot.attempt) == proposal.ballot.proposer and not book.is_void(proposal)


def decided_proposal(
    book: Book, voters: tuple[PeerId, ...], equivocators: frozenset[PeerId] = frozenset()
) -> tuple[Digest, records.Proposal] | None:
    """The proposal that a quorum voted for in its ballot, with its entry id; None while there is none."""
    if not book.votes and not book.other_votes:
        return None
    # Most of the time there are few votes, and this is asked at every event.
    if not has_votes(book, len(voters)):
        return None
    asked = voters, equivocators
    if asked not in book.decided:
        if len(book.decided) >= ANSWERS_KEPT:
            book.decided.clear()
        book.decided[asked] = _find_decided(book, voters, equivocators)
    return book.decided[asked]


def _find_decided(
    book: Book, voters: tuple[PeerId, ...], equivocators: frozenset[PeerId]
) -> tuple[Digest, records.Proposal] | None:
    needed = quorum(len(voters))
    enough = needed - len(book.other_votes)
    for entry, proposal in sorted(book.proposals.items()):
        if len(book.votes.get(proposal.ballot, ())) < enough or not _can_win(book, voters, proposal):
            continue
        if len(votes_for(book, voters, equivocators, entry, proposal)) >= needed:
            return entry, proposal
    return None


def has_votes(book: Book, count: int) -> bool:
    """Whether as many votes as a quorum of `count` voters are in a ballot with a proposal, whoever wrote them."""
    needed = quorum(count) - len(book.other_votes)
    # To look up a ballot costs more than to count its votes, and mostly no ballot has enough.
    if needed > 0 and max(map(len, book.votes.values()), default=0) < needed:
        return False
    return any(len(book.votes.get(proposal.ballot, ())) >= needed for proposal in book.proposals.values())


def votes_for(
    book: Book,
    voters: Iterable[PeerId],
    equivocators: frozenset[PeerId],
    entry: Digest,
    proposal: records.Proposal,
) -> dict[PeerId, Digest]:
    """The votes for this proposal in its ballot: entry id by voter."""
    # Of an equivocator every vote counts. What its feed forbids depends on the history, and nodes hold different
    # ones. Two sets become final by it only with a third of liars.
    found: dict[PeerId, Digest] = {}
    votes = book.votes.get(proposal.ballot, {})
    for peer in voters:
        name, vote = votes.get(peer, (entry, None))
        other = book.other_votes.get((peer, proposal.ballot, entry)) if peer in equivocators else None
        if vote is not None and vote.proposal == entry:
            found[peer] = name
        elif other is not None:
            found[peer] = other
    return found
