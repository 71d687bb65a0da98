"""Which windows of a packed text a member trains on in a round, and so which shards it needs. Pure, in integers.

A shard of n tokens has ⌊(n − 1) / context⌋ windows; each shares only its last token with the next. A member reads
one unit after the other from its first window to its last: it needs a new shard once in many rounds, and the bytes
that it fetches are about those that it reads. Documents were shuffled when the text was packed, so windows that
follow each other have nothing else in common. A unit is a shard, or an equal part of one where the run has more
members than shards: so no two members read the same windows in one pass.

In a run with audits (docs/audits.md) a member's shard is drawn from its PeerID, for as many rounds as the shard
lasts, and the first window of each round as well; a round longer than a shard has several. Whoever audits the
member draws the same.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from atoll.protocols.data.shard_index import ShardIndex
from atoll.protocols.ids import PeerId, digest
from atoll.protocols.run.run_spec import RunSpec

_ORDER = b"atoll/shard-order/1"
_ASSIGNED = b"atoll/assigned-shard/1"


class Turn(NamedTuple):
    """A member's part in a round."""

    round: int
    author: PeerId
    slot: int = 0
    """Place of the member among those that train the round."""
    slots: int = 1


class Stretch(NamedTuple):
    """Windows of one shard that follow each other."""

    shard: int
    first: int
    windows: int


def windows_a_shard(index: ShardIndex, context: int) -> int:
    """Number of whole windows in each shard; 0 where a shard is shorter than one."""
    return (index.shard_tokens - 1) // context


def most_windows(spec: RunSpec, number: int) -> int:
    """The most windows that a member's weight in a round may stand for."""
    return -(-spec.steps(number) * spec.inner.batch * spec.pace.most_256 // 256)


def shards_of(spec: RunSpec, index: ShardIndex, turn: Turn) -> tuple[int, ...]:
    """The shards that a member may read in a round, in the order in which it reads them."""
    found = stretches(spec, index, turn, most_windows(spec, turn.round))
    return tuple(dict.fromkeys(each.shard for each in found))


def stretches(spec: RunSpec, index: ShardIndex, turn: Turn, count: int) -> Iterator[Stretch]:
    """The first `count` windows of a member's turn, in its order."""
    return _assigned(spec, index, turn, count) if spec.audit else _in_order(spec, index, turn, count)


def _in_order(spec: RunSpec, index: ShardIndex, turn: Turn, count: int) -> Iterator[Stretch]:
    """Units are dealt to the members one after the other, in another order in each pass."""
    per = windows_a_shard(index, spec.model.context)
    parts = min(per, -(-turn.slots // index.count))
    unit, units = per // parts, index.count * parts
    at = spec.steps_before(turn.round) * spec.inner.batch
    end = at + count
    while at < end:
        passes, place = divmod(at // unit * turn.slots + turn.slot, units)
        part, shard = divmod(_shuffled(spec.seed, passes, units)[place], index.count)
        first = at % unit
        taken = min(unit - first, end - at)
        yield Stretch(shard, part * unit + first, taken)
        at += taken


def _assigned(spec: RunSpec, index: ShardIndex, turn: Turn, count: int) -> Iterator[Stretch]:
    """A drawn shard from a drawn window on, around its end; a longer round goes on in another drawn shard."""
    per = windows_a_shard(index, spec.model.context)
    # By the longest stage, because the draw must not depend on where in the schedule a round lies.
    lasts = max(1, per // (max(stage.steps for stage in spec.outer.stages) * spec.inner.batch))
    begin = _draw(spec.seed, b"window", turn.round, turn.author) % per
    at = 0
    while at < count:
        whole, first = at // per, (begin + at) % per
        shard = _draw(spec.seed, b"shard %d" % whole, turn.round // lasts, turn.author) % index.count
        taken = min(per - first, count - at, (whole + 1) * per - at)
        yield Stretch(shard, first, taken)
        at += taken


def _draw(seed: int, what: bytes, number: int, author: PeerId) -> int:
    parts = what, seed.to_bytes(8, "little"), number.to_bytes(4, "little"), author.encode()
    return int.from_bytes(digest(_ASSIGNED, *parts)[:8], "little")


@lru_cache(maxsize=4)
def _shuffled(seed: int, passes: int, units: int) -> tuple[int, ...]:
    """The numbers below `units` in the order of one pass: sorted by their hashes."""
    key = seed.to_bytes(8, "little") + passes.to_bytes(8, "little")
    return tuple(sorted(range(units), key=lambda unit: digest(_ORDER, key, unit.to_bytes(8, "little"))))
