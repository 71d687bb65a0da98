"""A reducer's error feedback along the chain of its Reductions, and the data that opens them."""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from atoll.node.learning.reduction.packing import packed
from atoll.node.learning.reduction.reducing import (
    Arithmetic,
    ReducerErrorFeedback,
    Weighted,
    decode_rows,
    kept_leaves,
    minus,
    moved,
    nothing_kept,
    reduce_rows,
)
from atoll.protocols.errors import LocalFault
from atoll.protocols.ids import Digest
from atoll.protocols.ledger.reduction import Offer, Opening, ReductionRules, opened_span
from atoll.protocols.ledger.rows import RowPart, RowTree
from atoll.protocols.merkle import levels_of, path_of
from atoll.protocols.run.arena import Span
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


class Claimed(NamedTuple):
    """What a published reduction says of itself."""

    span: Span
    previous: bytes
    """Name of the reduction that it continues; empty: it began with zeros."""
    began: bytes
    """Root of the error feedback that it began with; empty: zeros."""
    kept: bytes
    """Root of the error feedback that remains."""


class Reducer:
    """One node's reductions, in order, under names of the caller's choice; each can be opened until forgotten."""

    def __init__(self, rules: ReductionRules, arithmetic: Arithmetic) -> None:
        self._rules = rules
        self._arithmetic = arithmetic
        self._made: dict[bytes, Made] = {}
        self._last: ChainEnd | None = None
        self._dropped: ChainEnd | None = None
        self._before: ChainEnd | None = None
        """What the last reduction of an earlier life began with."""

    @property
    def last(self) -> ChainEnd | None:
        """The end of the chain, to be saved; None: the next reduction begins with zeros."""
        return self._last

    @property
    def before_last(self) -> ChainEnd | None:
        """What the last reduction began with, if its slice had moved: the end alone does not show it then."""
        made = self._made.get(self._last.name) if self._last is not None else None
        if made is None:
            return self._before
        moved = made.previous and made.began.span != made.span
        return ChainEnd(made.previous, made.began, made.previous_levels) if moved else None

    def restore(self, *saved: tuple[bytes, ReducerErrorFeedback]) -> None:
        """Go on from a saved end of the chain, and what it began with. What was reduced is to be made again."""
        ends = [ChainEnd(name, left, levels_of(kept_leaves(left.values_C4096))) for name, left in saved]
        self._last, self._before = ends[0], ends[1] if len(ends) > 1 else None

    def drop(self) -> None:
        """The next reduction begins with zeros. What the chain ended with may still show how it came about."""
        self._dropped, self._last = self._last or self._dropped, None

    def reduce(self, span: Span, rows: Mapping[Offer, RowPart]) -> tuple[Made, ReducerErrorFeedback | None]:
        """The reduction of these rows; and error feedback to hand back, None where the slice is as before."""
        before = self._last
        made, rest = self._make(before, span, rows)
        return made, rest if before is not None and before.left.span != span else None

    def make_again(self, name: bytes, rows: Mapping[Offer, RowPart], payload: bytes, *, claim: Claimed) -> None:
        """Make a published reduction of an earlier life again, so that it can be opened. Raises LocalFault.

        Its chain must be known before it, or after it: what it began with is what remained, less what came in.
        """
        span, previous = claim.span, claim.previous
        ends = self._ends()
        before, end = ends.get(previous), ends.get(name)
        if before is None and previous and end is not None and end.left.span == span:
            index, q = self._arithmetic.decode(payload, span.chunks, self._rules.reduced_k)
            values = end.left.values_C4096.to(torch.int64).scatter_add_(1, index, q)
            values -= self._arithmetic.weighted_mean(self._members(rows), self._rules.floor_256)
            began = values.to(torch.int32)
            before = ChainEnd(previous, ReducerErrorFeedback(span, began), levels_of(kept_leaves(began)))
        if before is None and previous:
            raise LocalFault("what that Reduction began with is not known")
        made, _ = self._make(before, span, rows)
        # Another opening than the published one would look like the fault of this node.
        root = made.previous_levels[-1][0] if previous else b""
        if (made.payload, made.kept_root, root) != (payload, claim.kept, claim.began):
            raise LocalFault("that Reduction cannot be made again")
        self._made[name] = made

    def _ends(self) -> dict[bytes, ChainEnd]:
        """Every end of a chain that is known, by the name of the reduction that left it."""
        known = [end for end in (self._last, self._dropped, self._before) if end is not None]
        began = [ChainEnd(made.previous, made.began, made.previous_levels) for made in list(self._made.values())]
        return {end.name: end for end in (*began, *known) if end.name}

    def _members(self, rows: Mapping[Offer, RowPart]) -> list[Weighted]:
        # By entry id: the sums need no order, but an opening lists the rows in this one.
        part_of = self._rules.k, self._arithmetic
        return [(offer.weight, *decode_rows(rows[offer].rows, *part_of)) for offer in sorted(rows)]

    def _make(
        self, before: ChainEnd | None, span: Span, rows: Mapping[Offer, RowPart]
    ) -> tuple[Made, ReducerErrorFeedback | None]:
        began, rest = (nothing_kept(span), None) if before is None else moved(before.left, span)
        payload, after = reduce_rows(
            began.values_C4096, self._members(rows), self._rules.reduced_k, self._rules.floor_256, self._arithmetic
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
            raw=tuple(rows[offer] for offer in sorted(rows)),
        )
        return made, rest

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
        """Everything about a chunk of our Reduction and its neighbours. Raises LocalFault for one not here."""
        made = self._of(entry)
        if not made.span.holds(chunk):
            raise LocalFault(f"chunk {chunk} is not in the slice")
        span = opened_span(made.span, chunk)
        place, k = span.start - made.span.start, self._rules.k
        rows, rows_path = made.tree.part(Span(place, place + span.chunks))
        known = known_before(made.began.span if made.previous_levels else None, span)
        at = known.start - made.began.span.start
        return Opening(
            span=span,
            rows=rows,
            rows_path=rows_path,
            before=tuple(packed(values) for values in made.began.values_C4096[at : at + known.chunks]),
            before_path=path_of(made.previous_levels, at, known.chunks) if known.chunks else b"",
            after=tuple(made.kept_levels[0][place : place + span.chunks]),
            after_path=path_of(made.kept_levels, place, span.chunks),
            raw=tuple(part.some(span, k) for part in made.raw),
        )

    def forget(self, name: bytes) -> None:
        """Drop the data that opens a reduction, because its round is final. The chain goes on."""
        self._made.pop(name, None)
        if self._before is not None and name > self._before.name:
            self._before = None

    def _of(self, entry: bytes) -> Made:
        made = self._made.get(entry)  # one look: openings are made in a thread, and the round may become final
        if made is None:
            raise LocalFault("that Reduction is not ours, or final")
        return made


def known_before(before: Span | None, span: Span) -> Span:
    """The chunks of `span` that the slice before had, if there was one: the others began with zeros."""
    if before is None:
        return Span(span.start, span.start)
    start = min(max(span.start, before.start), span.stop)
    return Span(start, max(start, min(span.stop, before.stop)))
