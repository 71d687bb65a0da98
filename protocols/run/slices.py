"""Which member reduces which slice of the arena in a round: a pure function of a final set, the same everywhere.

The arena is cut into as many even slices as there are reducers. A slice goes to the author whose BLAKE3(run,
slice, peer) is highest among the authors without a slice (rendezvous hashing: D. Thaler, C. Ravishankar, 1998; one
slice each keeps the load even: V. Mirrokni et al., 2018). The round is not part of the hash: a reducer keeps its
slice, and with it its error feedback, for as long as it takes part.
"""

from collections.abc import Collection
from functools import lru_cache
from typing import Annotated

import msgspec
from msgspec import Meta

from atoll.protocols.ids import PeerId, RunId, digest, peer_bytes
from atoll.protocols.run.arena import Span

MAX_REDUCERS = 256
"""Most slices of a round. A set names its Reductions too: a quarter of what it may name at most."""
_KEPT_BITS = 5


class ReduceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When and how coarsely slices are reduced; agreed by all members of a run."""

    above: Annotated[int, Meta(ge=1, le=1 << 16)] = 16
    """A round with more contributors than this is reduced; in smaller rounds every node gets every payload."""
    # A final set is known one round later at the earliest, so a gap of 1 would never reduce.
    gap: Annotated[int, Meta(ge=2, le=64)] = 4
    """The reducers of round r are authors of the final set of round r - gap."""
    k: Annotated[int, Meta(ge=1, le=4096)] = 128
    """Values that a Reduction keeps of each chunk of 4096."""
    sample_256: Annotated[int, Meta(ge=0, le=1 << 16)] = 48
    """Share, in 256ths, of a reduced round's chunks that its members open together to audit them; 0: none.

    Each member draws by itself, so a chunk is opened by somebody with 1 − e^(−share): 17 % of chunks at 48. One
    that is wrong in every round is found within 10 rounds with 85 %, and within 18 with 96 %, at any size.
    """


class SlicePlan(msgspec.Struct, frozen=True):
    """The slices of one round and their reducers."""

    authors: tuple[PeerId, ...]
    """Authors of the final set that decided, sorted: the bits of `Reduction.covered`."""
    reducers: tuple[PeerId, ...]
    """Reducer of each span; empty: the round is not reduced, and one span covers the arena."""
    spans: tuple[Span, ...]
    """The slices, in the order of the arena."""

    def span_of(self, peer: PeerId) -> Span | None:
        """The slice that `peer` reduces; None if it reduces none."""
        return self.spans[self.reducers.index(peer)] if peer in self.reducers else None


def all_gather(chunks: int) -> SlicePlan:
    """The plan without reducers: for small rounds, and while the deciding set is not known here."""
    return SlicePlan((), (), (Span(0, chunks),))


@lru_cache(maxsize=256)
def plan_of(
    run: RunId, authors: frozenset[PeerId], absent: frozenset[PeerId], chunks: int, spec: ReduceSpec
) -> SlicePlan:
    """The plan that follows from the authors of the deciding final set.

    `absent`: members that are passed over, because their Reductions missed final sets (docs/wires/reduction.md).
    """
    able = authors - absent
    count = slice_count(len(able), chunks)
    if len(authors) <= spec.above or not count:
        return all_gather(chunks)
    spans = tuple(slice_span(number, count, chunks) for number in range(count))
    return SlicePlan(tuple(sorted(authors)), _reducers(run, able, count), spans)


def slice_count(able: int, chunks: int) -> int:
    """How many slices an arena of `chunks` chunks is cut into if so many members can reduce one."""
    return min(even_count(able), chunks, MAX_REDUCERS)


def even_count(members: int) -> int:
    """`members` with all but its upper five bits cleared, so that slices move only after growth by a sixteenth."""
    drop = max(0, members.bit_length() - _KEPT_BITS)
    return members >> drop << drop


def slice_span(number: int, count: int, chunks: int) -> Span:
    """The chunks of slice `number` of `count`."""
    return Span(number * chunks // count, (number + 1) * chunks // count)


def _reducers(run: RunId, able: Collection[PeerId], count: int) -> tuple[PeerId, ...]:
    free = set(able)
    chosen: list[PeerId] = []
    for number in range(count):
        best = max(
            free,
            key=lambda peer: digest(b"atoll/reducer/1\0", run, number.to_bytes(4, "little"), peer_bytes(peer)),
        )
        chosen.append(best)
        free.remove(best)
    return tuple(chosen)
