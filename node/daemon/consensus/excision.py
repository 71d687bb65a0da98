"""Excisions: the work of excluded members that a later final round takes out of the rounds before it. Pure.

A record says whose work should go: the run owner's, or those of enough voters (`wanted`). A proposal says
whose work its state takes out, so what is final names it: all nodes make the same correction in the same round. A
voter needs a reason in its own ledger before it votes for such a proposal; to follow a final round, nobody does.
Rules: docs/removal.md.
"""

from collections.abc import Collection, Iterable, Mapping

from msgspec.structs import replace

from atoll.node.daemon.consensus.exclusion import needed_votes
from atoll.node.daemon.consensus.types import Correction, Excision, FinalityState
from atoll.protocols.ids import PeerId, Round
from atoll.protocols.ledger.ballots import Book
from atoll.protocols.ledger.choices import Choice
from atoll.protocols.ledger.records import MAX_EXCISED, Excised

MAX_CORRECTED = 8192
"""Contributions in the window, beside the newest round's: one request to the worker names them all (4 MiB)."""


def wanted(state: FinalityState) -> Mapping[PeerId, int]:
    """Whose work the owner, or enough voters, want taken out, and since which round."""
    by_owner, votes = state.epochs.to_excise, state.epochs.excise_votes
    if not votes:
        return by_owner
    cast = [votes[peer] for peer in state.voters if peer in votes and peer not in state.equivocators]
    needed, found = needed_votes(state, state.voters), dict[PeerId, int]()
    # Only of members that are excluded: whoever is away could not defend itself against a few that are there.
    for peer in state.epochs.excluded_from(state.deciding):
        since = sorted(each[peer] for each in cast if peer in each)
        if len(since) >= needed:
            found[peer] = since[needed - 1]  # so many of them want this round, or one before it
    return {**found, **by_owner}


def due(state: FinalityState) -> tuple[Excised, ...]:
    """Whose work this node wants the next round's state to take out of the rounds before; sorted by peer."""
    if not state.excise_rounds or not (asked := wanted(state)):
        return ()  # nearly always, and this is asked at every vote
    gone, first = state.epochs.excluded_from(state.deciding), min(state.window, default=state.deciding)
    # Once per member: after its exclusion it has no new work, and a round before the window has no payloads.
    peers = sorted(peer for peer in asked if peer in gone and peer not in state.excised)
    found = (Excised(peer, Round(max(first, asked[peer]))) for peer in peers)
    return tuple(one for one in found if corrections(state, (one,)))[:MAX_EXCISED]


def able(state: FinalityState) -> tuple[Excised, ...]:
    """What of `due` this node can compute now, and so may propose."""
    # A proposer that lacks a payload proposes without the correction: a lost payload must not stop finality.
    return tuple(one for one in due(state) if one.peer in state.retrievable)


def is_due(state: FinalityState, excised: Collection[Excised]) -> bool:
    """Whether this node has a reason for all that a proposal takes out."""
    return set(excised) <= set(due(state))


def corrections(state: FinalityState, excised: Iterable[Excised]) -> tuple[Correction, ...]:
    """The rounds whose sets become smaller, rising: the next round adds U(after) − U(before) of each."""
    since = {one.peer: one.since for one in excised}
    found: list[Correction] = []
    for number, counted in sorted(state.window.items()):
        left = [name for name, author in counted.items() if since.get(author, state.rounds) > number]
        if len(left) < len(counted):
            found.append(Correction(Round(number), tuple(sorted(counted)), tuple(sorted(left))))
    return tuple(found)


def note_final(state: FinalityState, book: Book, choice: Choice) -> FinalityState:
    """The state that knows what counts in the newest final rounds, after `choice` became the newest one's."""
    number, first = state.last_final, state.deciding - state.excise_rounds
    since = {one.peer: one.since for one in choice.excised}
    # Without what is taken out: a later correction of the same round begins with what is left.
    window = {
        at: {name: author for name, author in counted.items() if since.get(author, state.rounds) > at}
        for at, counted in state.window.items()
        if at >= first
    }
    # The oldest rounds leave first, and on all nodes alike: the sets alone say which.
    while sum(map(len, window.values())) > MAX_CORRECTED:
        del window[min(window)]
    window[number] = {name: book.contributions[name][0] for name in choice.names if name in book.contributions}
    done = {peer: Excision(number, at) for peer, at in since.items()}
    return replace(state, window=window, excised={**state.excised, **done})
