"""The check of an opening: whether a Reduction is wrong.

Anybody can open chunks of a reduction and compute it again. There are three endings: the opening does not fit
the signed roots (DecodeError: blame who sent it, nothing is proven); it fits and the chunk is right; or it fits
and the chunk is wrong: then opening and entries together are a proof.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from atoll.node.learning.reduction.packing import unpacked
from atoll.node.learning.reduction.reducer import known_before
from atoll.node.learning.reduction.reducing import Arithmetic, decode_rows, kept_leaves, reduce_rows
from atoll.protocols.errors import DecodeError
from atoll.protocols.ledger.records import Entry, Reduction, SlicedContribution, decode_entry, set_digest
from atoll.protocols.ledger.reduction import FaultProof, Opening, ReductionRules, opened_span
from atoll.protocols.ledger.rows import checked_rows, cut_rows
from atoll.protocols.merkle import check_path
from atoll.protocols.run.arena import CHUNK, Span
from atoll.protocols.run.payload import Layout


def proves_fault(proof: FaultProof, rules: ReductionRules, arithmetic: Arithmetic) -> bool:
    """Whether the proof shows a wrong Reduction. Raises DecodeError or SignatureFault if it does not fit."""
    claim = decode_entry(proof.reduction, rules.run)
    if not isinstance(claim.body, Reduction):
        raise DecodeError("fault proof: its first entry is no Reduction")
    offers = [decode_entry(data, rules.run) for data in proof.contributions]
    before = decode_entry(proof.previous, rules.run) if proof.previous else None
    _check_links(claim, claim.body, offers, before)
    bodies = [offer.body for offer in offers if isinstance(offer.body, SlicedContribution)]
    previous = before.body if before is not None and isinstance(before.body, Reduction) else None
    began = _checked(claim.body, previous, bodies, proof.opening, rules)
    return not is_right(proof.opening, bodies, began, rules, arithmetic)


def is_right(
    opening: Opening,
    contributions: Sequence[SlicedContribution],
    began: Tensor,
    rules: ReductionRules,
    arithmetic: Arithmetic,
) -> bool:
    """Whether the chunks, computed again from what went in, are what came out. The paths were checked.

    `began`: int32 `[chunks, 4096]`, the error feedback before the round.
    """
    members = [
        (body.weight, *decode_rows(rows, rules.k, arithmetic))
        for body, (rows, _) in zip(contributions, opening.raw, strict=True)
    ]
    payload, after = reduce_rows(began, members, rules.reduced_k, rules.floor_256, arithmetic)
    rows = b"".join(cut_rows(payload, Layout("sparse2", len(began), rules.reduced_k)))
    return rows == opening.rows and tuple(kept_leaves(after)) == opening.after


def _check_links(claim: Entry, body: Reduction, offers: Sequence[Entry], before: Entry | None) -> None:
    """Raise DecodeError unless these are the entries that the Reduction is about."""
    # Rising and without duplicates, as the digest of a set is defined: one set has one list.
    names = [offer.id for offer in offers]
    if names != sorted(set(names)) or set_digest(names) != body.members:
        raise DecodeError("fault proof: other contributions than those that the Reduction covers")
    if any(not isinstance(offer.body, SlicedContribution) or offer.body.round != body.round for offer in offers):
        raise DecodeError("fault proof: an entry is no sliced contribution to the round")
    if (before.id if before is not None else b"") != body.previous:
        raise DecodeError("fault proof: another Reduction before than the one that is named")
    if before is not None and (not isinstance(before.body, Reduction) or before.author != claim.author):
        raise DecodeError("fault proof: the entry before is no Reduction of the author")


def _checked(
    body: Reduction,
    previous: Reduction | None,
    contributions: Sequence[SlicedContribution],
    opening: Opening,
    rules: ReductionRules,
) -> Tensor:
    """The error feedback before, int32 `[chunks, 4096]`. Raises DecodeError unless all is under a signed root."""
    span, whole = opening.span, body.span
    if not whole.holds(span.start) or span != opened_span(whole, span.start) or whole.stop > rules.chunks:
        raise DecodeError("opening: other chunks than are opened together")
    if len(opening.raw) != len(contributions) or len(opening.after) != span.chunks:
        raise DecodeError("opening: not as many rows as contributions, or leaves as chunks")
    for contribution, (rows, path) in zip(contributions, opening.raw, strict=True):
        checked_rows(contribution.rows, rules.chunks, rules.k, span, rows, path)
    place = span.start - whole.start
    here = Span(place, place + span.chunks)
    checked_rows(body.rows, whole.chunks, rules.reduced_k, here, opening.rows, opening.rows_path)
    check_path(body.kept, whole.chunks, place, opening.after, opening.after_path)
    return _checked_before(previous, opening)


def _checked_before(previous: Reduction | None, opening: Opening) -> Tensor:
    # The reducer begins with zeros on chunks that its last slice did not have: there is nothing to show then.
    span, began = opening.span, torch.zeros((opening.span.chunks, CHUNK), dtype=torch.int32)
    known = known_before(previous.span if previous is not None else None, span)
    if len(opening.before) != known.chunks:
        raise DecodeError("opening: error feedback of other chunks than the slice before has")
    if previous is None or not known.chunks:
        if opening.before_path:
            raise DecodeError("opening: a path to nothing")
        return began
    at = known.start - span.start
    began[at : at + known.chunks] = torch.stack([unpacked(data) for data in opening.before])
    leaves, place = kept_leaves(began[at : at + known.chunks]), known.start - previous.span.start
    check_path(previous.kept, previous.span.chunks, place, leaves, opening.before_path)
    return began
