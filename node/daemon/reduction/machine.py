"""One node in one reduced round: a pure machine. It asks once for everything that it needs, and then it folds.

    contributions seen ──▶ reducer: rows of its slice ──▶ collected ──▶ Reduce ──▶ its Reduction is published
                           every node: Reductions as they appear, raw rows of what they leave out
    no Reduction of a slice when patience ends ──▶ raw rows of that slice, of all contributions
    a proven fault ──▶ the Reduction is no longer one; raw rows instead, and the fold is made again
    rows, or a Reduction's payload, that nobody has ──▶ the fold is made without, and again should they come

`step(state, event)` has no clock, no network and no randomness. The coordinator decides when contributions are
collected (the round closes) and when patience with reducers ends.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from atoll.node.daemon.reduction.effective_set import EffectiveSlice, effective_slices, entries_of, one_per_author
from atoll.protocols.ids import Digest, PeerId, Round, RunId
from atoll.protocols.ledger.records import MAX_SET
from atoll.protocols.ledger.reduction import Claim, Offer, covered_by
from atoll.protocols.ledger.set_limit import Seniority, first_places
from atoll.protocols.run.arena import Span
from atoll.protocols.run.slices import SlicePlan

NO_RUN = RunId(Digest(b""))


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
    """The round closes: contributions that come later are late."""


@dataclass(frozen=True, slots=True)
class PatienceOver:
    """Slices without a Reduction are no longer waited for."""


@dataclass(frozen=True, slots=True)
class Wrong:
    """A Reduction is proven wrong, or its payload is illegal."""

    entry: Digest


@dataclass(frozen=True, slots=True)
class Righted:
    """A Reduction that counted as wrong is in its round's final set, or was opened at last."""

    entry: Digest


@dataclass(frozen=True, slots=True)
class Gone:
    """Nobody has rows of this contribution that are needed, or the payload of this Reduction."""

    entry: Digest


@dataclass(frozen=True, slots=True)
class Excluded:
    """This author is excluded: neither its contribution counts, nor what covers it."""

    author: PeerId


@dataclass(frozen=True, slots=True)
class Ranked:
    """Who comes first if there are more contributions than a set may name."""

    seniority: Seniority


Event = (
    OfferSeen
    | ClaimSeen
    | RowsHeld
    | ReductionHeld
    | Collected
    | PatienceOver
    | Wrong
    | Righted
    | Gone
    | Excluded
    | Ranked
)


@dataclass(frozen=True, slots=True)
class FetchRows:
    """Get rows of a contribution, from its author or from another holder."""

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
    """Everything that counts is here: fold exactly these slices."""

    parts: tuple[EffectiveSlice, ...]
    entries: tuple[Digest, ...]


Action = FetchRows | FetchReduction | ReduceSlice | FoldSlices


@dataclass(frozen=True, slots=True)
class State:
    """Everything that one node knows about one reduced round."""

    me: PeerId
    number: Round
    plan: SlicePlan
    run: RunId = NO_RUN
    """Id of the run."""
    seniority: Seniority = field(default_factory=Seniority)
    """Who comes first if there are more contributions than a set may name."""
    offers: frozenset[Offer] = frozenset()
    claims: Mapping[Digest, Claim] = field(default_factory=dict)
    """Reductions of this round and of earlier ones, which it may continue."""
    wrong: frozenset[Digest] = frozenset()
    gone: frozenset[Digest] = frozenset()
    """Contributions and Reductions that nobody gives."""
    excluded: frozenset[PeerId] = frozenset()
    """Authors that are excluded from this round, or from one before it."""
    surplus: frozenset[Digest] = frozenset()
    """Contributions that the set has no place for."""
    rows: frozenset[tuple[Digest, Span]] = frozenset()
    """Rows on disk, by contribution and slice."""
    payloads: frozenset[Digest] = frozenset()
    """Reductions whose payload is on disk."""
    asked: frozenset[Action] = frozenset()
    """Every fetch that was asked for: none is repeated, because the fetchers retry by themselves."""
    collected: bool = False
    patient: bool = True
    reduced: bool = False
    """The own slice was reduced, or needs no reduction any more."""
    folded: tuple[EffectiveSlice, ...] = ()
    """What the newest FoldSlices held."""
    parts: tuple[EffectiveSlice, ...] = ()
    """What counts by the records alone, whether it is on disk or not."""


def step(state: State, event: Event) -> tuple[State, list[Action]]:
    """Return the next state and the actions. A repeated event changes nothing and asks for nothing."""
    state = _apply(state, event)
    if isinstance(event, OfferSeen | Excluded | Ranked):
        state = replace(state, surplus=_surplus(state))
    state = replace(state, parts=_parts(state, event))
    fresh = [action for action in dict.fromkeys(_needed(state)) if action not in state.asked]
    state = replace(state, asked=state.asked | frozenset(fresh))
    state, reduction = _reduction(state)
    state, fold = _fold(state)
    return state, [*fresh, *reduction, *fold]


def _parts(state: State, event: Event) -> tuple[EffectiveSlice, ...]:
    """Return what counts after an event."""
    # A payload that was given up counts again when it comes; rows on disk never change what counts.
    changes = isinstance(event, Gone | ReductionHeld) and event.entry in state.claims and event.entry in state.gone
    if not changes and not isinstance(event, OfferSeen | ClaimSeen | Wrong | Righted | Excluded | Ranked):
        return state.parts
    spans = state.plan.spans
    # A Reduction of this round changes its own slice only. One of an earlier round may taint those of any slice.
    if isinstance(event, ClaimSeen) and state.parts and event.claim.body.round == state.number:
        spans = (event.claim.body.span,)
    made = effective_slices(state.number, state.plan, state.offers, state.claims, state.wrong, _lost(state), spans)
    fresh = {part.span: part for part in made}
    return tuple(fresh.get(part.span, part) for part in state.parts) if state.parts else made


def missing_slices(state: State) -> tuple[Span, ...]:
    """Return the slices that wait for their Reduction."""
    return tuple(part.span for part in state.parts if part.reduced is None and state.plan.reducers)


def missing_payloads(state: State) -> tuple[Digest, ...]:
    """Return the Reductions that count and whose payload is not here."""
    reduced = (part.reduced.entry for part in state.parts if part.reduced is not None)
    return tuple(entry for entry in reduced if entry not in state.payloads)


def missing_authors(state: State) -> frozenset[PeerId]:
    """Return the authors of what counts and is not here: of Reductions' payloads, and of raw rows."""
    reduced = {state.claims[entry].author for entry in missing_payloads(state)}
    return frozenset(reduced | {action.offer.author for action in _lacking_rows(state)})


def _lacking_rows(state: State) -> Iterator[FetchRows]:
    return (action for part in state.parts for action in _rows(state, part.raw, part.span))


def _apply(state: State, event: Event) -> State:
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
        case Righted(entry):
            return replace(state, wrong=state.wrong - {entry})
        case Gone(entry):
            return replace(state, gone=state.gone | {entry})
        case Excluded(author):
            return replace(state, excluded=state.excluded | {author})
        case Ranked(seniority):
            return replace(state, seniority=seniority)
        case Collected():
            return replace(state, collected=True)
        case PatienceOver():
            return replace(state, patient=False)


def _needed(state: State) -> Iterator[Action]:
    """Yield everything that this node needs and does not hold, asked for before or not."""
    mine = state.plan.span_of(state.me)
    # A reducer needs the rows of its slice from everybody, before the round closes.
    if mine is not None and not state.reduced:
        yield from _rows(state, _named(state), mine)
    for part in state.parts:
        if part.reduced is not None and part.reduced.entry not in state.payloads:
            yield FetchReduction(part.reduced)
        # Raw rows only once no Reduction can spare them: they are most of the traffic of a round.
        if _is_decided(state, part):
            yield from _rows(state, part.raw, part.span)


def _rows(state: State, offers: tuple[Offer, ...], span: Span) -> Iterator[FetchRows]:
    for offer in offers:
        if offer.author != state.me and (offer.entry, span) not in state.rows:
            yield FetchRows(offer, span)


def _is_decided(state: State, part: EffectiveSlice) -> bool:
    """Return whether the slice stays as it is. Before that a Reduction may still come and cover the rest."""
    if not state.plan.reducers:
        return True
    if not state.collected:
        return False
    return part.reduced is not None or not state.patient or _is_caught(state, part.span)


def _is_caught(state: State, span: Span) -> bool:
    """Return whether the slice's Reduction is proven wrong, or has excluded work: nothing better will come."""
    claims = (state.claims[entry] for entry in state.wrong | _barred(state) if entry in state.claims)
    return any(claim.body.round == state.number and claim.body.span == span for claim in claims)


def _reduction(state: State) -> tuple[State, list[Action]]:
    """Reduce the own slice once, when the round closes, from the rows that are here then."""
    mine = state.plan.span_of(state.me)
    if mine is None or state.reduced or not state.collected:
        return state, []
    # A contribution without rows here is left out of the Reduction. It still counts raw where it is held.
    offers = tuple(o for o in _named(state) if o.author == state.me or (o.entry, mine) in state.rows)
    return replace(state, reduced=True), [ReduceSlice(mine, offers)] if offers else []


def _fold(state: State) -> tuple[State, list[Action]]:
    """Fold when all that counts is here, and again when something else counts."""
    if not state.collected or not all(_is_decided(state, part) for part in state.parts):
        return state, []
    gone, parts = _absent(state), state.parts
    absent = gone | state.surplus | _barred(state)
    if gone:
        # Rows that nobody gives: the set is made without their contributions, in all slices alike.
        lost = absent | _lost(state)
        parts = effective_slices(state.number, state.plan, state.offers, state.claims, state.wrong, lost)
    if parts == state.folded or not all(_is_here(state, part) for part in parts):
        return state, []
    return replace(state, folded=parts), [FoldSlices(parts, entries_of(parts, state.offers, absent))]


def _absent(state: State) -> frozenset[Digest]:
    """Return the contributions whose rows are needed and given by nobody."""
    return state.gone.intersection(action.offer.entry for action in _lacking_rows(state))


def _lost(state: State) -> frozenset[Digest]:
    """Return Reductions whose payload nobody gives, what has no place, what is of or covers excluded work."""
    return (state.gone.intersection(state.claims) - state.payloads) | state.surplus | _barred(state)


def _counted(state: State) -> tuple[Offer, ...]:
    """Return the contributions of authors that are not excluded; all, if there is no other."""
    offers = one_per_author(state.offers)
    return tuple(o for o in offers if o.author not in state.excluded) or offers


def _named(state: State) -> tuple[Offer, ...]:
    """Return the contributions that count and that the set has a place for."""
    return tuple(offer for offer in _counted(state) if offer.entry not in state.surplus)


def _surplus(state: State) -> frozenset[Digest]:
    """Return the contributions that come last, beyond what a set may name beside a Reduction of each slice."""
    # Where a Reduction covers one of them it counts all the same, as one that its author's death left out.
    most = MAX_SET - len(state.plan.reducers)
    authors = {offer.entry: offer.author for offer in _counted(state)} if len(state.offers) > most else {}
    return frozenset(authors).difference(first_places(state.run, state.number, authors, state.seniority, most))


def _barred(state: State) -> frozenset[Digest]:
    """Return what does not count: contributions and Reductions of excluded authors, and what covers these."""
    if not state.excluded:
        return frozenset()
    work = {offer.entry for offer in state.offers} - {offer.entry for offer in _counted(state)}
    claims = [claim for claim in state.claims.values() if claim.body.round == state.number]
    known = one_per_author(state.offers)
    # A covered contribution counts in the slice of its reducer though it is not in the set.
    covering = {c.entry for c in claims if work & {o.entry for o in covered_by(c.body, state.plan, known) or ()}}
    return frozenset(work | covering | {c.entry for c in claims if c.author in state.excluded})


def _is_here(state: State, part: EffectiveSlice) -> bool:
    reduced = part.reduced is None or part.reduced.entry in state.payloads
    return reduced and not any(_rows(state, part.raw, part.span))
