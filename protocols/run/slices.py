"""Who reduces which part of the arena in a round: a pure function of a final set, so nobody has to be asked.

The arena is cut into as many even slices as there are reducers. A slice goes to the author whose
BLAKE3(run, slice, peer) is highest among those who have none yet (rendezvous hashing: D. Thaler, C. Ravishankar,
1998; one slice each keeps the load even: V. Mirrokni et al., 2018). The round is not part of the hash: a reducer
keeps its slice, and with it its error feedback, for as long as it takes part.
"""

from collections.abc import Collection
from functools import lru_cache

import msgspec

from atoll.protocols.errors import ConfigError
from atoll.protocols.ids import PeerId, Round, RunId, digest, peer_bytes
from atoll.protocols.run.arena import Span

_KEPT_BITS = 5
# a final set of a reduced round is known one round later at the earliest: a gap of 1 would never reduce
_BOUNDS = (("above", 1, 1 << 16), ("gap", 2, 64), ("k", 1, 4096), ("sample_256", 0, 1 << 16))


class ReduceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When and how coarsely slices are reduced; agreed by all members of a run."""

    above: int = 16
    """With more contributors than this a round is reduced; up to it every node gets every payload."""
    gap: int = 4
    """The reducers of round r are authors of the final set of round r - gap."""
    k: int = 128
    """Values that a reduction keeps of each chunk of 4096."""
    sample_256: int = 13
    """Openings may cost a member this share of the payload bytes of a reduced round, on average; 0: none."""

    def check(self) -> None:
        """Raise ConfigError, with the key's name, for values that no run can have."""
        for name, low, high in _BOUNDS:
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"reduce.{name} = {getattr(self, name)} is outside {low} … {high}")


class SlicePlan(msgspec.Struct, frozen=True):
    """Slices of one round and who reduces them."""

    authors: tuple[PeerId, ...]
    """Authors of the final set that decided, sorted: the bits of `Reduction.covered`."""
    reducers: tuple[PeerId, ...]
    """Reducer of each span. Empty: nobody reduces, there is one span, and everybody gets every payload."""
    spans: tuple[Span, ...]

    def span_of(self, peer: PeerId) -> Span | None:
        """What `peer` reduces."""
        return self.spans[self.reducers.index(peer)] if peer in self.reducers else None


def all_gather(chunks: int) -> SlicePlan:
    """Nobody reduces: small rounds, and rounds whose deciding set is not known here yet."""
    return SlicePlan((), (), (Span(0, chunks),))


def decided_by(number: Round, spec: ReduceSpec) -> Round | None:
    """The round whose final set names the reducers of round `number`; None: nobody reduces."""
    return Round(number - spec.gap) if number >= spec.gap else None


@lru_cache(maxsize=256)
def plan_of(
    run: RunId, authors: frozenset[PeerId], absent: frozenset[PeerId], chunks: int, spec: ReduceSpec
) -> SlicePlan:
    """Slices and reducers, of the authors of the deciding final set.

    `absent`: reducers of that round whose reduction is not in its final set. They were gone, late or wrong, and
    reduce nothing this time.
    """
    able = authors - absent
    count = min(even_count(len(able)), chunks)
    if len(authors) <= spec.above or not count:
        return all_gather(chunks)
    spans = tuple(_span(number, count, chunks) for number in range(count))
    return SlicePlan(tuple(sorted(authors)), _reducers(run, able, count), spans)


def even_count(members: int) -> int:
    """`members` with all but its upper five bits cleared: slices move only when a swarm grows by a sixteenth."""
    drop = max(0, members.bit_length() - _KEPT_BITS)
    return members >> drop << drop


def _span(number: int, count: int, chunks: int) -> Span:
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
