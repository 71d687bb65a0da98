"""Whether a reduction is right, one chunk at a time: anybody can open a chunk that it chose and compute it again.

Three endings: the opening does not fit the signed roots (DecodeError: blame who sent it, nothing is proven); it
fits and the chunk is right; or it fits and the chunk is wrong: then opening and entries together are a proof.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from atoll.node.learning.reduction.arithmetic import Arithmetic, decode_rows
from atoll.node.learning.reduction.reducing import kept_bytes, reduce_rows
from atoll.protocols.errors import DecodeError
from atoll.protocols.ledger.records import Entry, Reduction, SlicedContribution, decode_entry, set_digest
from atoll.protocols.ledger.reduction import KEPT_BYTES, FaultProof, Opening, ReductionRules
from atoll.protocols.ledger.rows import checked_rows, cut_rows
from atoll.protocols.merkle import check_path, leaf_of
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
    _check_paths(claim.body, previous, bodies, proof.opening, rules)
    return not is_right(proof.opening, bodies, rules, arithmetic)


def is_right(
    opening: Opening, contributions: Sequence[SlicedContribution], rules: ReductionRules, arithmetic: Arithmetic
) -> bool:
    """Whether the chunk, computed again from what went in, is what came out. The paths were checked."""
    members = [
        (body.weight, *decode_rows(row, rules.k, arithmetic))
        for body, (row, _) in zip(contributions, opening.raw, strict=True)
    ]
    payload, after = reduce_rows(kept_of(opening.before), members, rules.reduced_k, rules.floor_256, arithmetic)
    row = cut_rows(payload, Layout("sparse2", 1, rules.reduced_k))[0]
    return row == opening.row and leaf_of(kept_bytes(after[0])) == opening.after


def kept_of(data: bytes) -> Tensor:
    """int32 `[1, 4096]` of an opening's `before`."""
    if not data:
        return torch.zeros((1, CHUNK), dtype=torch.int32)
    return torch.frombuffer(bytearray(data), dtype=torch.int32).reshape(1, CHUNK)


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


def _check_paths(
    body: Reduction,
    previous: Reduction | None,
    contributions: Sequence[SlicedContribution],
    opening: Opening,
    rules: ReductionRules,
) -> None:
    """Raise DecodeError unless everything in the opening is under a signed root."""
    chunk, span = opening.chunk, body.span
    if not span.holds(chunk) or span.stop > rules.chunks or len(opening.raw) != len(contributions):
        raise DecodeError("opening: a chunk outside the slice, or not as many rows as contributions")
    for contribution, (row, path) in zip(contributions, opening.raw, strict=True):
        checked_rows(contribution.rows, rules.chunks, rules.k, Span(chunk, chunk + 1), row, path)
    place = chunk - span.start
    checked_rows(body.rows, span.chunks, rules.reduced_k, Span(place, place + 1), opening.row, opening.row_path)
    check_path(body.kept, span.chunks, place, [opening.after], opening.after_path)
    # The reducer begins with zeros on chunks that its last slice did not have: there is nothing to show then.
    if previous is None or not previous.span.holds(chunk):
        if opening.before or opening.before_path:
            raise DecodeError("opening: error feedback where the reducer is new to the chunk")
        return
    if len(opening.before) != KEPT_BYTES:
        raise DecodeError("opening: error feedback of another size")
    place = chunk - previous.span.start
    check_path(previous.kept, previous.span.chunks, place, [leaf_of(opening.before)], opening.before_path)
