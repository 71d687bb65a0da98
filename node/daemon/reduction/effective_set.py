"""Which payloads a round's model is made of, slice by slice: a pure function of a set of records.

Order, repeats and lateness of the records leave no trace: two nodes with the same set name the same payloads.

A set holds Reductions, and contributions that count raw wherever no Reduction covers them. A contribution that is
not in the set (its author died before all members had it) still counts in the slices whose reducer got it: a
covered contribution must be known, but need not be held.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.ledger.reduction import Claim, Offer, covered_by
from atoll.protocols.run.arena import Span
from atoll.protocols.run.slices import SlicePlan


class EffectiveSlice(NamedTuple):
    """What counts in one slice."""

    span: Span
    reduced: Claim | None
    """Replaces the contributions that it covers, with the sum of their weights."""
    weight: int
    """Sum over the covered contributions."""
    raw: tuple[Offer, ...]
    """The contributions of the set that the Reduction does not cover, by rising entry id."""


def one_per_author(offers: Iterable[Offer]) -> tuple[Offer, ...]:
    """Return the first contribution in each author's feed, by rising entry id."""
    # The feed's order is signed. The order of arrival differs between nodes, and would give them different sets.
    first: dict[PeerId, Offer] = {}
    for offer in sorted(set(offers), key=lambda offer: (offer.seq, offer.entry)):
        first.setdefault(offer.author, offer)
    return tuple(sorted(first.values()))


def effective_slices(
    number: Round,
    plan: SlicePlan,
    offers: Iterable[Offer],
    claims: Mapping[Digest, Claim],
    wrong: Collection[Digest] = (),
    absent: Collection[Digest] = (),
    spans: Collection[Span] | None = None,
) -> tuple[EffectiveSlice, ...]:
    """Return what counts in every slice of round `number`, or only in the slices `spans`.

    `offers`: the contributions that the ledger knows. `absent`: those that do not count raw, and Reductions whose
    payload nobody has. `claims`: the known Reductions of this round and of remembered earlier ones, one for each
    author and round. `wrong`: Reductions with a checked proof against them, or with an illegal payload.
    """
    counted = one_per_author(offers)
    bad = tainted(claims, wrong)
    sound: dict[Span, list[Claim]] = {}
    for claim in sorted(claims.values()):
        # A lost Reduction is treated as if it had not been written, so its contributions count raw.
        if claim.body.round == number and claim.entry not in bad and claim.entry not in absent:
            sound.setdefault(claim.body.span, []).append(claim)
    asked = plan.spans if spans is None else spans
    return tuple(_slice(plan, span, counted, sound.get(span, []), absent) for span in asked)


def tainted(claims: Mapping[Digest, Claim], wrong: Collection[Digest]) -> frozenset[Digest]:
    """Return `wrong`, and every Reduction that continues a tainted one or one that it may not continue."""
    bad = set(wrong)
    # By rising round, so that one pass finds whole chains: a Reduction continues one of an earlier round.
    for claim in sorted(claims.values(), key=lambda claim: claim.body.round):
        before = claims.get(Digest(claim.body.previous))
        unlawful = before is not None and (before.author != claim.author or before.body.round >= claim.body.round)
        if unlawful or claim.body.previous in bad:
            bad.add(claim.entry)
    return frozenset(bad)


def entries_of(
    parts: Iterable[EffectiveSlice], offers: Iterable[Offer], absent: Collection[Digest] = ()
) -> tuple[Digest, ...]:
    """Return the sorted entry ids of the set, contributions and Reductions: what members vote on."""
    names = {offer.entry for offer in one_per_author(offers)} - set(absent)
    return tuple(sorted(names | {part.reduced.entry for part in parts if part.reduced is not None}))


def _slice(
    plan: SlicePlan, span: Span, offers: tuple[Offer, ...], claims: Iterable[Claim], absent: Collection[Digest]
) -> EffectiveSlice:
    """Return the designated reducer's Reduction, if all that it covers is known; the rest is raw."""
    present = tuple(offer for offer in offers if offer.entry not in absent) if absent else offers
    for claim in claims:
        if plan.span_of(claim.author) == span:
            # Covered contributions are looked up among all known ones, also those that are not in the set.
            covered = covered_by(claim.body, plan, offers)
            if covered is not None:
                names = {offer.entry for offer in covered}
                raw = tuple(offer for offer in present if offer.entry not in names)
                return EffectiveSlice(span, claim, sum(offer.weight for offer in covered), raw)
    return EffectiveSlice(span, None, 0, present)
