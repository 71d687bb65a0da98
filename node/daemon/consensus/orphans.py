"""Entries of authors with two histories: what of theirs this node must fetch by name to go on. Pure.

A feed takes one history. After an author signed two, nodes hold different ones, and none of them can get the
other's entries in order. A final set, or a proposal that others voted for, may stand in either. So a node asks for
single entries by id: what proposals name, proposals that votes name, and the equivocators' votes for them; also in
old rounds from which on others work in another chain: who cannot see that the epoch before decided such a round
could never join them. And for the signatures under epochs that others are in, for the same reason.
"""

from collections import Counter

from msgspec.structs import replace

from atoll.node.daemon.consensus.forks import deciders_of, disputed
from atoll.node.daemon.consensus.types import FetchOrphans, FinalityState, Wanted
from atoll.node.daemon.consensus.voter import Out, is_stuck
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.ledger.ballots import Book, named_by, votes_for
from atoll.protocols.ledger.records import Contribution, Epoch, Proposal, Reduction, Vote

ORPHAN_BODIES = Contribution, Epoch, Proposal, Reduction, Vote
"""What a node takes of an equivocator's other history. The rest of it binds nobody."""
MAX_EPOCHS = 16
"""Epochs that are asked for at a time: anybody can choose what nobody knows."""
MAX_FORKS = 4
"""Old rounds that are asked about at a time, the oldest first."""
MAX_ASKED = 256
"""Names in one list of a FetchOrphans. What a larger set lacks is asked for in turn, as names are answered."""


def fetch_orphans(state: FinalityState) -> Out:
    """Ask for what the round that is decided now lacks, and old ones where chains part, if that changed."""
    forks = disputed(state)[:MAX_FORKS] if state.equivocators else []
    places: dict[int, tuple[PeerId, ...]] = {}
    for number, voters in [*forks, (state.deciding, state.voters)]:
        places[number] = (*places.get(number, ()), *voters)  # several epochs may have begun at one round
    found = {at: _wanted(state, at, voters) for at, voters in places.items() if at < state.rounds}
    wanted, asked = {number: one for number, one in found.items() if any(one)}, state.orphans_asked
    if wanted == asked:
        return state, []
    changed = [number for number in {**asked, **wanted} if wanted.get(number) != asked.get(number)]
    actions = [FetchOrphans(Round(number), *wanted.get(number, ((), ()))) for number in changed]
    return replace(state, orphans_asked=wanted), [*actions]


def _wanted(state: FinalityState, number: int, voters: tuple[PeerId, ...]) -> Wanted:
    book, liars = state.books.get(number, Book()), state.equivocators
    # While there are equivocators this is asked at every event, and most of these change no ballot.
    if (voters, liars) not in book.named:
        book.named[voters, liars] = _named(book, voters, liars)
    names, unknown, lacking = book.named[voters, liars]
    begun = state.epochs.lacking(liars) if liars and number == state.deciding else []
    if len(begun) > MAX_EPOCHS:  # strangers chose what they made up: what deciders chose comes before that
        known = {peer: state.epochs.choice(peer) for peer in deciders_of(state) - liars}
        begun = list(dict.fromkeys([*replace(state.epochs, chosen=known).lacking(liars), *begun]))
    entries = tuple(dict.fromkeys([*map(Digest, begun[:MAX_EPOCHS]), *unknown, *lacking]))[:MAX_ASKED]
    is_hidden = is_stuck(state) or not liars.isdisjoint(voters)
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
