"""Certificate that a round is final with a state: ledger entries that prove it from the RunSpec alone.

It holds, for every round up to that one, the decided proposal, a quorum of votes for it, and the contributions
that it names. The voters of a round are the authors of the final set of the round before, so a certificate goes
back to round 0, which the run's owner decides. It is as good as the voters: a false one needs the signatures of a
quorum of some round's voters; a final set with a single author leaves them to that one (docs/threat-model.md).
Where voters were gone it holds the epoch that the others opened, signed by all of its members. One voter or recent
member is enough for an epoch, so a certificate with epochs (`Proven.epochs`) is as good as that one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from atoll.node.daemon.consensus.chains.epochs import ROOT, EpochId
from atoll.node.daemon.consensus.types import RECENT_ROUNDS
from atoll.protocols import codec
from atoll.protocols.audits.shown_work import first_tally
from atoll.protocols.errors import ConfigError, DecodeError, PeerFault
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.ledger.ballots import (
    Book,
    add_entry,
    add_orphan,
    decided_proposal,
    quorum,
    voter_order,
    votes_for,
)
from atoll.protocols.ledger.choices import choice_of
from atoll.protocols.ledger.entry_rules import is_lawful
from atoll.protocols.ledger.probation import Tally
from atoll.protocols.ledger.records import MAX_SET, Entry, Epoch, Proposal, decode_entry, encode_entry, epoch_id
from atoll.protocols.run.run_spec import RunSpec

VERSION = 2
MEMBER_ROUNDS = 16
"""A member is an author in at least one of this many newest final sets. One set would not do: a user pauses one
node after the other, and the last round may be a single node's."""
PROOF_MAX_BYTES = 1 << 30

# A proposal, its votes, its contributions and as many Reductions.
_SignedEntries: TypeAlias = Annotated[tuple[bytes, ...], Meta(max_length=1 + 3 * MAX_SET)]
_SignedEpoch: TypeAlias = Annotated[tuple[bytes, ...], Meta(min_length=1, max_length=MAX_SET)]
EntriesOf = Callable[[int], Sequence[Entry]]
"""All entries about a round, each author's in order."""


class FinalProof(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The encoded certificate: signed entries, round by round, from round 0."""

    version: int
    rounds: Annotated[tuple[_SignedEntries, ...], Meta(max_length=1 << 24)]
    epochs: Annotated[tuple[_SignedEpoch, ...], Meta(max_length=1 << 16)]
    """The Epoch entry of each member, by epoch, in the order in which they decided."""


class Proven(NamedTuple):
    """The facts that a certificate proves."""

    round: Round
    state: Digest
    """Digest of Θ_final after this round."""
    members: tuple[PeerId, ...]
    """Authors of the newest MEMBER_ROUNDS final sets, sorted."""
    known: frozenset[PeerId]
    """Authors of the final sets of all rounds up to it."""
    epochs: int
    """How many epochs it goes through."""
    entries: Mapping[PeerId, int]
    """The number of entries that each author's feed has at least."""
    excluded: Mapping[PeerId, int]
    """First round without each member that a final proposal excludes."""

    @property
    def needed(self) -> int:
        """The size of a quorum of the members."""
        return quorum(len(self.members))


class _Decided(NamedTuple):
    entry: Digest
    proposal: Proposal
    book: Book

    @property
    def authors(self) -> set[PeerId]:
        """Authors of the set's contributions: the voters of the next round."""
        return self.book.authors_of(self.proposal.contributions)

    def next_round(
        self, spec: RunSpec, voters: tuple[PeerId, ...], tally: Tally
    ) -> tuple[tuple[PeerId, ...], Tally]:
        """The voters of the round after, and the tally after this one, which `voters` decided."""
        authors, known = self.authors, self.book.contributions
        members = ((name, *known[name]) for name in self.proposal.contributions if name in known)
        deciding = tally.proven(authors, voters)
        return voter_order(spec.id, self.proposal.round + 1, deciding), tally.after(authors, members, deciding)


def gather(
    spec: RunSpec,
    last: int,
    entries_of: EntriesOf,
    path: tuple[Epoch, ...] = (),
    orphans_of: EntriesOf = lambda number: (),
    equivocators: frozenset[PeerId] = frozenset(),
) -> bytes:
    """The encoded certificate of round `last`, on the chain of these epochs (`chosen_path`).

    `orphans_of`: the entries about a round that no feed holds; `equivocators`: their authors. Raises ConfigError
    where the ledger has none.
    """
    voters: tuple[PeerId, ...] = (spec.owner,)
    rounds, epochs, epoch, tally = [], [], ROOT, first_tally(spec)
    for number in range(last + 1):
        entries = [entry for entry in entries_of(number) if is_lawful(spec, entry)]
        orphans = [entry for entry in orphans_of(number) if is_lawful(spec, entry)]
        exempt = {*voters}
        while path and path[0].round == number:
            body, *rest = path
            path, epoch, voters = tuple(rest), epoch_id(body), voter_order(spec.id, number, body.members)
            exempt.update(voters)
            epochs.append(tuple(encode_entry(entry) for entry in _signatures([*entries, *orphans], body)))
        found = _decided(entries, number, voters, (tally, exempt), epoch, orphans, equivocators)
        if found is None:
            raise ConfigError(
                f"the ledger here does not prove that round {number} is final",
                hint="start the node for a moment: it gets what is missing from the others",
            )
        by_name = {entry.id: entry for entry in [*entries, *orphans]}
        rounds.append(tuple(encode_entry(by_name[name]) for name in sorted(_names(found, voters, equivocators))))
        voters, tally = found.next_round(spec, voters, tally)
    return codec.encode(FinalProof(VERSION, tuple(rounds), tuple(epochs)))


def _signatures(entries: Iterable[Entry], body: Epoch) -> list[Entry]:
    """The first entry of each member with this body."""
    signed = {entry.author: entry for entry in reversed(list(entries)) if entry.body == body}
    return [signed[peer] for peer in body.members if peer in signed]


class _Epochs:
    """The epochs that a certificate holds, to be entered one after the other."""

    def __init__(self, spec: RunSpec, signed: tuple[_SignedEpoch, ...]) -> None:
        """Raises DecodeError unless every member of every epoch signed it, and each continues the one before."""
        self._run = spec.id
        self._bodies: list[Epoch] = []
        self.epoch: EpochId = ROOT
        self.exempt = set[PeerId]()
        """Who is no newcomer in the round that was asked about last (`exempt_of`)."""
        parent: EpochId = ROOT
        for each in signed:
            entries = [decode_entry(entry, spec.id) for entry in each]
            body = entries[0].body
            authors = tuple(entry.author for entry in entries)
            if not isinstance(body, Epoch) or body.parent != parent or authors != body.members:
                raise DecodeError("an epoch that not all of its members signed, or that does not continue another")
            if any(entry.body != body for entry in entries):
                raise DecodeError("an epoch whose members signed different ones")
            parent = epoch_id(body)
            self._bodies.append(body)

    def enter(self, number: int, voters: tuple[PeerId, ...], recent: set[PeerId]) -> tuple[PeerId, ...]:
        """The voters of a round, `voters` unless an epoch begins there. Raises DecodeError."""
        self.exempt = {*voters}
        while self._bodies and self._bodies[0].round == number:
            body = self._bodies.pop(0)
            # Else anybody could prove anything with an epoch of keys that it made up.
            if recent.union(voters).isdisjoint(body.members):
                raise DecodeError(
                    f"the epoch of round {number} has neither a voter of that round nor a recent member"
                )
            self.epoch, voters = epoch_id(body), voter_order(self._run, number, body.members)
            self.exempt.update(voters)
        return voters


def proven(spec: RunSpec, data: bytes) -> Proven:
    """The facts that an encoded certificate proves of this run. Raises DecodeError, SignatureFault."""
    proof = codec.decode(data, FinalProof, max_bytes=PROOF_MAX_BYTES)
    if proof.version != VERSION or not 1 <= len(proof.rounds) <= spec.outer.rounds:
        raise DecodeError(f"a proof of version {proof.version}, or not of the run's rounds")
    voters: tuple[PeerId, ...] = (spec.owner,)
    epochs, tally = _Epochs(spec, proof.epochs), first_tally(spec)
    found: _Decided | None = None
    sets: list[set[PeerId]] = []
    lengths: dict[PeerId, int] = {}
    excluded: dict[PeerId, int] = {}
    for number, signed in enumerate(proof.rounds):
        voters = epochs.enter(number, voters, set[PeerId]().union(*sets[-RECENT_ROUNDS:]))
        # A proposal, its votes, at most MAX_SET contributions and as many Reductions: before any signature.
        if len(signed) > 1 + quorum(len(voters)) + 2 * MAX_SET:
            raise DecodeError(f"more entries than round {number} has")
        entries = [decode_entry(entry, spec.id) for entry in signed]
        for entry in entries:
            lengths[entry.author] = max(lengths.get(entry.author, 0), entry.seq + 1)
        lawful = [entry for entry in entries if is_lawful(spec, entry)]
        found = _decided(lawful, number, voters, (tally, epochs.exempt), epochs.epoch)
        if found is None:
            raise DecodeError(f"it does not prove that round {number} is final")
        sets.append(found.authors)
        excluded = {**dict.fromkeys(choice_of(found.proposal).excluded, number + 1), **excluded}
        voters, tally = found.next_round(spec, voters, tally)
    assert found is not None
    members = sorted(set[PeerId]().union(*sets[-MEMBER_ROUNDS:]))
    return Proven(
        round=Round(len(sets) - 1),
        state=found.proposal.state,
        members=tuple(members),
        known=frozenset[PeerId]().union(*sets),
        epochs=len(proof.epochs),
        entries=lengths,
        excluded=excluded,
    )


def read_proof(spec: RunSpec, data: bytes, where: object) -> Proven:
    """The facts that the certificate in a file of ours proves; `where` names the file. Raises ConfigError."""
    try:
        return proven(spec, data)
    except PeerFault as error:
        raise ConfigError(f"{where} is no proof of a final round of this run: {error}") from error


def _decided(
    entries: Iterable[Entry],
    number: int,
    voters: tuple[PeerId, ...],
    bound: tuple[Tally, set[PeerId]],
    epoch: EpochId,
    orphans: Iterable[Entry] = (),
    equivocators: frozenset[PeerId] = frozenset(),
) -> _Decided | None:
    """The decided proposal with all that its set names, from the entries about a round; None without them."""
    book = Book()
    for entry in entries:
        if entry.body.round == number:
            book, _ = add_entry(book, entry.id, entry.author, entry.body)
    for entry in orphans:
        book = add_orphan(book, entry.id, entry.author, entry.body)
    book = book.within(epoch).bounded(*bound)
    found = decided_proposal(book, voters, equivocators)
    if found is None or book.unknown(found[1].contributions):
        return None
    return _Decided(*found, book)


def _names(found: _Decided, voters: tuple[PeerId, ...], equivocators: frozenset[PeerId]) -> set[Digest]:
    """Ids of the entries that prove a round: proposal, set, and no more votes than a quorum."""
    given = [*votes_for(found.book, voters, equivocators, found.entry, found.proposal).values()]
    return {found.entry, *given[: quorum(len(voters))], *found.proposal.contributions}
