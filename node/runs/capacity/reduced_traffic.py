"""How many payload bytes a member moves in a reduced round: rows, Reductions and openings (docs/reduction.md).

Exact arithmetic of the RunSpec and of the wire, but for one measured size: the width of the error feedback in an
opening. All members contribute, all Reductions come in time, and nobody lies: slices that count raw and
proofs of faults are not in it.
"""

from collections.abc import Iterator

from atoll.protocols.ids import DIGEST_BYTES
from atoll.protocols.ledger.reduction import OPENED_CHUNKS
from atoll.protocols.ledger.rows import row_bytes
from atoll.protocols.merkle import path_digests
from atoll.protocols.run.arena import CHUNK, Span, arena_of
from atoll.protocols.run.payload import payload_bytes
from atoll.protocols.run.run_spec import RunSpec
from atoll.protocols.run.slices import slice_count, slice_span

ASK_BYTES = 90
"""A question for rows or for an opening, and what frames it and its answer."""
COPY_BYTES = 70
"""Manifest, requests and frames of one Reduction's payload, which is a blob."""
KEPT_BITS = 19
"""Bits of a value of the error feedback in an opening: its largest value decides, 17 to 20 were seen."""
SAMPLED = 16
"""Groups of chunks of a slice whose Merkle paths are looked at: of millions of chunks all would take seconds."""


def is_reduced(spec: RunSpec, members: int) -> bool:
    """Return whether a round of so many contributors is reduced."""
    return spec.reduce is not None and members > spec.reduce.above


def reduced_traffic(spec: RunSpec, members: int) -> float:
    """Bytes of a reduced round that are no records, each way: the mean of all members. The run has `reduce`.

    A reducer fetches the rows of its slice from all others; all others fetch its Reduction, and open their share.
    """
    assert spec.reduce is not None, "the run never reduces"
    chunks, count = arena_of(spec.model).chunks, reductions_of(spec, members)
    moved = 0.0
    for number in range(count):
        span = slice_span(number, count, chunks)
        rows = ASK_BYTES + span.chunks * row_bytes(spec.compress.k) + path_bytes(chunks, span)
        reduction = COPY_BYTES + payload_bytes(spec.compress.codec, span.chunks, spec.reduce.k)
        moved += (members - 1) * (rows + reduction) + opened_bytes(spec, span, members)
    return moved / members


def opened_bytes(spec: RunSpec, span: Span, members: int) -> float:
    """Bytes of the openings of one slice in a round, of all members together: `audit.py` draws so many."""
    assert spec.reduce is not None, "the run never reduces"
    groups = -(-span.chunks // OPENED_CHUNKS)
    # Each group is opened once by a member at most.
    opened = min(groups * spec.reduce.sample_256 / 256, groups * (members - 1))
    looked_at = list(some_groups(span, groups))
    each = sum(opening_bytes(spec, span, group, members) for group in looked_at) / len(looked_at)
    return opened * (ASK_BYTES + each)


def opening_bytes(spec: RunSpec, span: Span, group: Span, members: int) -> int:
    """Bytes of the opening of a group of chunks of a slice: docs/wires/reduction.md, "Openings and proofs"."""
    assert spec.reduce is not None, "the run never reduces"
    kept = 1 + CHUNK * KEPT_BITS // 8
    results = group.chunks * (kept + row_bytes(spec.reduce.k) + DIGEST_BYTES)
    # Of the Reduction's rows and of its error feedback before and after.
    paths = 3 * path_bytes(span.chunks, Span(group.start - span.start, group.stop - span.start))
    raw = group.chunks * row_bytes(spec.compress.k) + path_bytes(arena_of(spec.model).chunks, group)
    return results + paths + members * raw


def some_groups(span: Span, groups: int) -> Iterator[Span]:
    """Yield SAMPLED of the groups that are opened together, or all where they are fewer, evenly spread."""
    for place in range(min(groups, SAMPLED)):
        start = span.start + OPENED_CHUNKS * (place * groups // min(groups, SAMPLED))
        yield Span(start, min(start + OPENED_CHUNKS, span.stop))


def path_bytes(chunks: int, span: Span) -> int:
    """Bytes of the Merkle path of neighbouring chunks."""
    return DIGEST_BYTES * path_digests(chunks, span.start, span.chunks)


def reductions_of(spec: RunSpec, members: int) -> int:
    """Return how many Reductions a round of so many contributors has: one of each slice."""
    return slice_count(members, arena_of(spec.model).chunks) if is_reduced(spec, members) else 0
