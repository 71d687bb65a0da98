"""What a node has that the others need, read from its own state when it leaves."""

from collections.abc import Iterable

from atoll.node.daemon.consensus.chains.early_ballots import after
from atoll.node.daemon.consensus.types import FinalityState
from atoll.node.daemon.coordinator.contribution_sets import ContributionIndex
from atoll.node.daemon.coordinator.finalizer import Finalizer
from atoll.node.daemon.core.interfaces import RoundReducer
from atoll.node.daemon.leaving.holders import Needs
from atoll.protocols.ids import Digest, Round
from atoll.protocols.ledger.records import Proposal, Vote


def needs_of(
    finality: FinalityState, finalizer: Finalizer, contributions: ContributionIndex, reducer: RoundReducer
) -> Needs:
    """Return what is here of the newest final rounds and of the open ones. A node without a model has nothing."""
    if not finalizer.has_model:
        return Needs()
    sets = {
        number: payloads
        for number, names in finalizer.final_sets.items()
        if not reducer.is_reduced(number) and (payloads := _whole(contributions, names))
    }
    newest = max(-1, finalizer.applied)
    while newest + 1 in sets:  # final and not folded here: its payloads do as well
        newest += 1
    later = contributions.find(contributions.later(newest))
    names = {name for name, author, _ in later if author == contributions.me} | _voted(finality, newest)
    names = names.union(*(waiting for number, waiting in finalizer.final_sets.items() if number > newest))
    rounds = {record.round for _, _, record in contributions.find(names)}
    held = {number: _held(contributions, names, number) for number in rounds if not reducer.is_reduced(number)}
    return Needs(Round(newest), sets, {number: found for number, found in held.items() if found})


def _voted(finality: FinalityState, newest: int) -> set[Digest]:
    """What proposals with a vote name: the next voters may be bound to these sets."""
    books = [book for number, book in finality.books.items() if number > newest]
    early = dict(after(finality.waiting, newest))  # of rounds that this node did not reach
    voted = {vote.proposal for book in books for votes in book.votes.values() for _, vote in votes.values()}
    voted |= {body.proposal for body in early.values() if isinstance(body, Vote)}
    proposals = [p for book in books for name, p in book.proposals.items() if name in voted]
    proposals += [body for name, body in early.items() if name in voted and isinstance(body, Proposal)]
    return {name for proposal in proposals for name in proposal.contributions}


def _held(contributions: ContributionIndex, names: Iterable[Digest], number: int) -> frozenset[Digest]:
    """Return those payloads of these contributions to round `number` that are here."""
    found = contributions.find(filter(contributions.is_held, names))
    return frozenset(record.payload for _, _, record in found if record.round == number)


def _whole(contributions: ContributionIndex, names: tuple[Digest, ...]) -> frozenset[Digest] | None:
    """Return the payloads of a set; None unless all are here."""
    if not all(map(contributions.is_held, names)):  # nor is a Reduction, which is no contribution
        return None
    return frozenset(record.payload for _, _, record in contributions.find(names))
