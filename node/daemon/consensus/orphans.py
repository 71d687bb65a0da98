"""Entries of authors with two histories: what of theirs this node must fetch by name to go on. Pure.

A feed takes one history. After an author signed two, nodes hold different ones, and none of them can get the
other's entries in order. A final set, or a proposal that others voted for, may stand in either. So a node asks for
single entries by id: what proposals name, proposals that votes name, and the equivocators' votes for them. And
for the signatures under epochs that others are in: who cannot see how their chain began could never join it.
"""

from collections import Counter

from msgspec.structs import replace

from atoll.node.daemon.consensus.forks import deciders_of
from atoll.node.daemon.consensus.types import FetchOrphans, FinalityState
from atoll.node.daemon.consensus.voter import Out, is_stuck
from atoll.protocols.ids import Digest, PeerId
from atoll.protocols.ledger.ballots import Book, named_by, votes_for
from atoll.protocols.ledger.records import Contribution, Epoch, Proposal, Reduction, Vote

ORPHAN_BODIES = Contribution, Epoch, Proposal, Reduction, Vote
"""What a node takes of an equivocator's other history. The rest of it binds nobody."""
MAX_EPOCHS = 16
"""Epochs that are asked for at a time: anybody can choose what nobody knows."""
MAX_ASKED = 256
"""Names in one list of a FetchOrphans. What a larger set lacks is asked for in turn, as names are answered."""


def fetch_orphans(state: FinalityState) -> Out:
    """Ask for what the round that is decided now lacks, if that changed."""
    wanted = _wanted(state) if state.deciding < state.rounds else ((), ())
    if wanted == state.orphans_asked:
        return state, []
    return replace(state, orphans_asked=wanted), [FetchOrphans(state.deciding, *wanted)]


def _wanted(state: FinalityState) -> tuple[tuple[Digest, ...], tuple[Digest, ...]]:
    book, liars = state.book, state.equivocators
    # While there are equivocators this is asked at every event, and most of these change no ballot.
    if (state.voters, liars) not in book.named:
        book.named[state.voters, liars] = _named(book, state.voters, liars)
    names, unknown, lacking = book.named[state.voters, liars]
    begun = state.epochs.lacking(liars) if liars else []
    if len(begun) > MAX_EPOCHS:  # strangers chose what they made up: what deciders chose comes before that
        known = {peer: state.epochs.choice(peer) for peer in deciders_of(state) - liars}
        begun = list(dict.fromkeys([*replace(state.epochs, chosen=known).lacking(liars), *begun]))
    entries = tuple(dict.fromkeys([*map(Digest, begun[:MAX_EPOCHS]), *unknown, *lacking]))[:MAX_ASKED]
    is_hidden = is_stuck(state) or not state.equivocators.isdisjoint(state.voters)
    return entries, names[:MAX_ASKED] if is_hidden else ()


def _named(
    book: Book, voters: tuple[PeerId, ...], liars: frozenset[PeerId]
) -> tuple[tuple[Digest, ...], tuple[Digest, ...], tuple[Digest, ...]]:
    """The proposals that are here or have votes, those of them that are unknown, and what the others lack."""
    named = Counter[Digest]()
    for (_, name), many in named_by(book.votes, voters).items():
        named[name] += many
    known = {name: len(votes_for(book, voters, liars, name, one)) for name, one in book.proposals.items()}
    # Most votes first: a liar may propose any number of sets of names that nobody has, and nobody votes for these.
    names = sorted(known | named, key=lambda name: (-known.get(name, named[name]), name))
    sets = [book.proposals[name].contributions for name in names if name in known]
    lacking = tuple(entry for contributions in sets for entry in book.unknown(contributions))
    return tuple(names), tuple(name for name in names if name not in known), lacking
