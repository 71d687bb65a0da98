"""Which payloads a round's model is made of, slice by slice: a pure function of a set of records.

Order, repeats and lateness of the records leave no trace: two nodes with the same set name the same payloads.

A set is made of Reductions and of contributions that count raw wherever no Reduction covers them. A contribution
that is not in it (its author died before everybody had it) still counts in the slices whose reducer got it: what
a Reduction covers need only be known, not held.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.ledger.reduction import Claim, Offer, covered_by
from atoll.protocols.run.arena import Span
from atoll.protocols.run.slices import SlicePlan


class Effective(NamedTuple):
    """What counts in one slice."""

    span: Span
    reduced: Claim | None
    """Stands for the contributions that it covers, with their weights together."""
    weight: int
    """Of the covered ones."""
    raw: tuple[Offer, ...]
    """The contributions of the set that it does not cover, by rising entry id."""


def one_per_author(offers: Iterable[Offer]) -> tuple[Offer, ...]:
    """Of two contributions of one author the first in its feed counts: a later one cannot replace it. Rising."""
    first: dict[PeerId, Offer] = {}
    for offer in sorted(set(offers), key=lambda offer: (offer.seq, offer.entry)):
        first.setdefault(offer.author, offer)
    return tuple(sorted(first.values()))


def effective(
    number: Round,
    plan: SlicePlan,
    offers: Iterable[Offer],
    claims: Mapping[Digest, Claim],
    wrong: Collection[Digest] = (),
    absent: Collection[Digest] = (),
    spans: Collection[Span] | None = None,
) -> tuple[Effective, ...]:
    """What counts in every slice of round `number`, or only in some of them.

    `offers`: the contributions that the ledger knows. `absent`: those that do not count raw, and Reductions whose
    payload nobody has.
    `claims`: the Reductions known of this round, and of rounds before as far as they are remembered; of several of
    one author the first of each round only. `wrong`: those with a checked proof against them, or whose payload is
    illegal; what continues their error feedback is wrong too.
    """
    counted = one_per_author(offers)
    bad = tainted(claims, wrong)
    sound: dict[Span, list[Claim]] = {}
    for claim in sorted(claims.values()):
        if claim.body.round == number and claim.entry not in bad and claim.entry not in absent:
            sound.setdefault(claim.body.span, []).append(claim)
    asked = plan.spans if spans is None else spans
    return tuple(_slice(plan, span, counted, sound.get(span, []), absent) for span in asked)


def tainted(claims: Mapping[Digest, Claim], wrong: Collection[Digest]) -> frozenset[Digest]:
    """`wrong`, and every Reduction that continues a tainted one or one that it may not continue."""
    bad = set(wrong)
    for claim in sorted(claims.values(), key=lambda claim: claim.body.round):
        before = claims.get(Digest(claim.body.previous))
        unlawful = before is not None and (before.author != claim.author or before.body.round >= claim.body.round)
        if unlawful or claim.body.previous in bad:
            bad.add(claim.entry)
    return frozenset(bad)


def entries_of(
    parts: Iterable[Effective], offers: Iterable[Offer], absent: Collection[Digest] = ()
) -> tuple[Digest, ...]:
    """Entry ids of the set, contributions and Reductions: what members agree on. Sorted."""
    names = {offer.entry for offer in one_per_author(offers)} - set(absent)
    return tuple(sorted(names | {part.reduced.entry for part in parts if part.reduced is not None}))


def _slice(
    plan: SlicePlan, span: Span, offers: tuple[Offer, ...], claims: Iterable[Claim], absent: Collection[Digest]
) -> Effective:
    """The designated reducer's Reduction, if all that it covers is known; the rest is raw."""
    present = tuple(offer for offer in offers if offer.entry not in absent) if absent else offers
    for claim in claims:
        if plan.span_of(claim.author) == span:
            covered = covered_by(claim.body, plan, offers)
            if covered is not None:
                names = {offer.entry for offer in covered}
                raw = tuple(offer for offer in present if offer.entry not in names)
                return Effective(span, claim, sum(offer.weight for offer in covered), raw)
    return Effective(span, None, 0, present)
