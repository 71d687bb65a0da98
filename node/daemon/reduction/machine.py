"""One node in one round of the second topology: a pure machine. What it needs it asks for once; then it folds.

    contributions seen ──▶ reducer: rows of its slice ──▶ collected ──▶ Reduce ──▶ its Reduction is published
                           everybody: Reductions as they appear, raw rows of what they leave out
    no Reduction of a slice when patience ends ──▶ raw rows of that slice, of everybody
    a proven fault ──▶ the Reduction is no longer one; raw rows instead, and the fold is made again
    rows, or a Reduction's payload, that nobody has ──▶ the fold is made without, and again should they come

`step(state, event)` has no clock, no network and no randomness. Who drives it says when contributions are
collected (the round closes) and when patience with reducers ends.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from atoll.node.daemon.reduction.effective_set import Effective, effective, entries_of, one_per_author
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.ledger.reduction import Claim, Offer
from atoll.protocols.run.arena import Span
from atoll.protocols.run.slices import SlicePlan


@dataclass(frozen=True, slots=True)
class OfferSeen:
    """A contribution to the round is in the ledger."""

    offer: Offer


@dataclass(frozen=True, slots=True)
class ClaimSeen:
    """A Reduction is in the ledger, of this round or of one before."""

    claim: Claim


@dataclass(frozen=True, slots=True)
class RowsHeld:
    """Verified rows of a contribution are on disk."""

    entry: Digest
    span: Span


@dataclass(frozen=True, slots=True)
class ReductionHeld:
    """The payload of a Reduction is on disk, verified and legal."""

    entry: Digest


@dataclass(frozen=True, slots=True)
class Collected:
    """The round closes: whoever is not here yet is late."""


@dataclass(frozen=True, slots=True)
class PatienceOver:
    """Slices without a Reduction are no longer waited for."""


@dataclass(frozen=True, slots=True)
class Wrong:
    """A Reduction is proven wrong, or its payload is illegal."""

    entry: Digest


@dataclass(frozen=True, slots=True)
class Gone:
    """Nobody has rows of this contribution that are needed, or the payload of this Reduction."""

    entry: Digest


Event = OfferSeen | ClaimSeen | RowsHeld | ReductionHeld | Collected | PatienceOver | Wrong | Gone


@dataclass(frozen=True, slots=True)
class FetchRows:
    """Get rows of a contribution, from its author or from whoever has them."""

    offer: Offer
    span: Span


@dataclass(frozen=True, slots=True)
class FetchReduction:
    """Get the payload of a Reduction."""

    claim: Claim


@dataclass(frozen=True, slots=True)
class ReduceSlice:
    """Reduce our slice of these and publish the Reduction."""

    span: Span
    offers: tuple[Offer, ...]


@dataclass(frozen=True, slots=True)
class FoldSlices:
    """Everything that counts is here: set the round to it."""

    parts: tuple[Effective, ...]
    entries: tuple[Digest, ...]


Action = FetchRows | FetchReduction | ReduceSlice | FoldSlices


@dataclass(frozen=True, slots=True)
class State:
    """What one node knows of one round."""

    me: PeerId
    number: Round
    plan: SlicePlan
    offers: frozenset[Offer] = frozenset()
    claims: Mapping[Digest, Claim] = field(default_factory=dict)
    wrong: frozenset[Digest] = frozenset()
    gone: frozenset[Digest] = frozenset()
    rows: frozenset[tuple[Digest, Span]] = frozenset()
    payloads: frozenset[Digest] = frozenset()
    asked: frozenset[Action] = frozenset()
    collected: bool = False
    patient: bool = True
    reduced: bool = False
    folded: tuple[Effective, ...] = ()
    parts: tuple[Effective, ...] = ()
    """What counts by the records alone."""


def step(state: State, event: Event) -> tuple[State, list[Action]]:
    """The next state and what to do. The same event twice changes nothing and asks for nothing."""
    state = _heard(state, event)
    state = replace(state, parts=_parts(state, event))
    fresh = [action for action in dict.fromkeys(_wanted(state)) if action not in state.asked]
    state = replace(state, asked=state.asked | frozenset(fresh))
    state, reduction = _reduction(state)
    state, fold = _fold(state)
    return state, [*fresh, *reduction, *fold]


def _parts(state: State, event: Event) -> tuple[Effective, ...]:
    """What counts after an event; a Reduction of this round changes its own slice only."""
    changes = isinstance(event, Gone | ReductionHeld) and event.entry in state.claims and event.entry in state.gone
    if not changes and not isinstance(event, OfferSeen | ClaimSeen | Wrong):
        return state.parts
    spans = state.plan.spans
    if isinstance(event, ClaimSeen) and state.parts and event.claim.body.round == state.number:
        spans = (event.claim.body.span,)
    made = effective(state.number, state.plan, state.offers, state.claims, state.wrong, _lost(state), spans)
    fresh = {part.span: part for part in made}
    return tuple(fresh.get(part.span, part) for part in state.parts) if state.parts else made


def missing_slices(state: State) -> tuple[Span, ...]:
    """Slices that wait for their Reduction."""
    return tuple(part.span for part in state.parts if part.reduced is None and state.plan.reducers)


def missing_payloads(state: State) -> tuple[Digest, ...]:
    """Reductions that count and whose payload is not here."""
    reduced = (part.reduced.entry for part in state.parts if part.reduced is not None)
    return tuple(entry for entry in reduced if entry not in state.payloads)


def _heard(state: State, event: Event) -> State:
    match event:
        case OfferSeen(offer):
            return replace(state, offers=state.offers | {offer})
        case ClaimSeen(claim):
            ours = claim.author == state.me and claim.body.round == state.number
            claims = {**state.claims, claim.entry: claim}
            return replace(state, claims=claims, reduced=state.reduced or ours)
        case RowsHeld(entry, span):
            return replace(state, rows=state.rows | {(entry, span)})
        case ReductionHeld(entry):
            return replace(state, payloads=state.payloads | {entry})
        case Wrong(entry):
            return replace(state, wrong=state.wrong | {entry})
        case Gone(entry):
            return replace(state, gone=state.gone | {entry})
        case Collected():
            return replace(state, collected=True)
        case PatienceOver():
            return replace(state, patient=False)


def _wanted(state: State) -> Iterator[Action]:
    """Everything that this node needs and does not hold, asked for before or not."""
    mine = state.plan.span_of(state.me)
    if mine is not None and not state.reduced:
        yield from _rows(state, one_per_author(state.offers), mine)
    for part in state.parts:
        if part.reduced is not None and part.reduced.entry not in state.payloads:
            yield FetchReduction(part.reduced)
        if _is_settled(state, part):
            yield from _rows(state, part.raw, part.span)


def _rows(state: State, offers: tuple[Offer, ...], span: Span) -> Iterator[FetchRows]:
    for offer in offers:
        if offer.author != state.me and (offer.entry, span) not in state.rows:
            yield FetchRows(offer, span)


def _is_settled(state: State, part: Effective) -> bool:
    """Whether to go on with what the slice has: before, a Reduction may still come and cover the rest."""
    if not state.plan.reducers or not state.collected:
        return not state.plan.reducers
    return part.reduced is not None or not state.patient or _is_caught(state, part.span)


def _is_caught(state: State, span: Span) -> bool:
    """Whether the slice's reducer was proven wrong in this round: nothing better will come."""
    claims = (state.claims[entry] for entry in state.wrong if entry in state.claims)
    return any(claim.body.round == state.number and claim.body.span == span for claim in claims)


def _reduction(state: State) -> tuple[State, list[Action]]:
    """Reduce once, when the round closes, whatever rows are here then."""
    mine = state.plan.span_of(state.me)
    if mine is None or state.reduced or not state.collected:
        return state, []
    offers = tuple(
        o for o in one_per_author(state.offers) if o.author == state.me or (o.entry, mine) in state.rows
    )
    return replace(state, reduced=True), [ReduceSlice(mine, offers)] if offers else []


def _fold(state: State) -> tuple[State, list[Action]]:
    """Fold when all that counts is here, and again when something else counts."""
    if not state.collected or not all(_is_settled(state, part) for part in state.parts):
        return state, []
    absent, parts = _absent(state), state.parts
    if absent:
        lost = absent | _lost(state)
        parts = effective(state.number, state.plan, state.offers, state.claims, state.wrong, lost)
    if parts == state.folded or not all(_is_here(state, part) for part in parts):
        return state, []
    return replace(state, folded=parts), [FoldSlices(parts, entries_of(parts, state.offers, absent))]


def _absent(state: State) -> frozenset[Digest]:
    """Contributions of which rows are needed that nobody has."""
    lacking = (action.offer.entry for part in state.parts for action in _rows(state, part.raw, part.span))
    return state.gone.intersection(lacking)


def _lost(state: State) -> frozenset[Digest]:
    """Reductions whose payload nobody has."""
    return state.gone.intersection(state.claims) - state.payloads


def _is_here(state: State, part: Effective) -> bool:
    reduced = part.reduced is None or part.reduced.entry in state.payloads
    return reduced and not any(_rows(state, part.raw, part.span))
