"""A reducer's error feedback along the chain of its Reductions, the data that opens them, and the check of an
opening.

Anybody can open a chunk of a reduction and compute it again. There are three endings: the opening does not fit
the signed roots (DecodeError: blame who sent it, nothing is proven); it fits and the chunk is right; or it fits
and the chunk is wrong: then opening and entries together are a proof.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.node.learning.reduction.reducing import (
    Arithmetic,
    ReducerErrorFeedback,
    decode_rows,
    kept_bytes,
    kept_leaves,
    minus,
    moved,
    nothing_kept,
    reduce_rows,
)
from atoll.protocols.errors import DecodeError, LocalFault
from atoll.protocols.ids import Digest
from atoll.protocols.ledger.records import Entry, Reduction, SlicedContribution, decode_entry, set_digest
from atoll.protocols.ledger.reduction import KEPT_BYTES, FaultProof, Offer, Opening, ReductionRules
from atoll.protocols.ledger.rows import RowPart, RowTree, checked_rows, cut_rows
from atoll.protocols.merkle import check_path, leaf_of, levels_of, path_of
from atoll.protocols.run.arena import CHUNK, Span
from atoll.protocols.run.payload import Layout


class Made(NamedTuple):
    """A reduction that is not published yet: the fields of its record, and the data that opens it."""

    span: Span
    payload: bytes
    tree: RowTree
    kept_levels: list[list[Digest]]
    began: ReducerErrorFeedback
    left: ReducerErrorFeedback
    previous: bytes
    previous_levels: list[list[Digest]]
    raw: tuple[RowPart, ...]
    """Rows of the contributions, by rising entry id."""

    @property
    def kept_root(self) -> Digest:
        """Merkle root of the error feedback, `kept` of the record."""
        return self.kept_levels[-1][0]


class ChainEnd(NamedTuple):
    """The end of the chain: what the next reduction begins with."""

    name: bytes
    left: ReducerErrorFeedback
    levels: list[list[Digest]]


class Reducer:
    """One node's reductions, in order, under names of the caller's choice; each can be opened until forgotten."""

    def __init__(self, rules: ReductionRules, arithmetic: Arithmetic) -> None:
        self._rules = rules
        self._arithmetic = arithmetic
        self._made: dict[bytes, Made] = {}
        self._last: ChainEnd | None = None

    @property
    def last(self) -> ChainEnd | None:
        """The end of the chain, to be saved; None: the next reduction begins with zeros."""
        return self._last

    def restore(self, name: bytes, left: ReducerErrorFeedback) -> None:
        """Go on from a saved end of the chain. Earlier reductions cannot be opened any more."""
        self._last = ChainEnd(name, left, levels_of(kept_leaves(left.values_C4096)))

    def drop(self) -> None:
        """Forget the error feedback: the next reduction begins with zeros."""
        self._last = None

    def reduce(self, span: Span, rows: Mapping[Offer, RowPart]) -> tuple[Made, ReducerErrorFeedback | None]:
        """The reduction of these rows; and error feedback to hand back, None where the slice is as before."""
        before = self._last
        began, rest = (nothing_kept(span), None) if before is None else moved(before.left, span)
        # By entry id: the sums need no order, but an opening lists the rows in this one.
        offers = sorted(rows)
        members = [
            (offer.weight, *decode_rows(rows[offer].rows, self._rules.k, self._arithmetic)) for offer in offers
        ]
        payload, after = reduce_rows(
            began.values_C4096, members, self._rules.reduced_k, self._rules.floor_256, self._arithmetic
        )
        made = Made(
            span=span,
            payload=payload,
            tree=RowTree(payload, Layout("sparse2", span.chunks, self._rules.reduced_k)),
            kept_levels=levels_of(kept_leaves(after)),
            began=began if before is None else before.left,
            left=ReducerErrorFeedback(span, after),
            previous=b"" if before is None else before.name,
            previous_levels=[] if before is None else before.levels,
            raw=tuple(rows[offer] for offer in offers),
        )
        return made, rest if before is not None and before.left.span != span else None

    def published(self, name: bytes, made: Made) -> None:
        """`made` was published under this name; the next reduction goes on from it."""
        self._made[name], self._last = made, ChainEnd(name, made.left, made.kept_levels)

    def start_anew(self, missed: bytes) -> ReducerErrorFeedback:
        """One of our Reductions is not in its final set: the next begins with zeros. Returns what to hand back.

        The slice was added raw in that round, so what that round left is not owed; what came before and after is,
        unless it was handed back when an earlier round was missed. Raises LocalFault for one that is not here.
        """
        made, last = self._of(missed), self._last
        # What this round alone added to the chain: its end less its beginning, on the chunks of its own slice.
        added = minus(made.left, moved(made.began, made.span)[0])
        self._last = None
        owed = nothing_kept(made.span) if last is None else last.left
        return minus(owed, moved(added, owed.span)[0])

    def open(self, entry: bytes, chunk: int) -> Opening:
        """Everything about one chunk of one of our Reductions. Raises LocalFault for one that is not here."""
        made = self._of(entry)
        if not made.span.holds(chunk):
            raise LocalFault(f"chunk {chunk} is not in the slice")
        place, k = chunk - made.span.start, self._rules.k
        before, before_path = _opened(made.began, made.previous_levels, chunk)
        row, row_path = made.tree.part(Span(place, place + 1))
        return Opening(
            chunk=chunk,
            row=row,
            row_path=row_path,
            before=before,
            before_path=before_path,
            after=made.kept_levels[0][place],
            after_path=path_of(made.kept_levels, place, 1),
            raw=tuple(part.one(chunk, k) for part in made.raw),
        )

    def forget(self, name: bytes) -> None:
        """Drop the data that opens a reduction, because its round is final. The chain goes on."""
        self._made.pop(name, None)

    def _of(self, entry: bytes) -> Made:
        if entry not in self._made:
            raise LocalFault("that Reduction is not ours, or final")
        return self._made[entry]


def _opened(began: ReducerErrorFeedback, levels: Sequence[Sequence[Digest]], chunk: int) -> tuple[bytes, bytes]:
    """Error feedback of a chunk and its path to the previous Reduction's root; empty where it began with zeros."""
    if not levels or not began.span.holds(chunk):
        return b"", b""
    place = chunk - began.span.start
    return kept_bytes(began.values_C4096[place]), path_of(levels, place, 1)


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
