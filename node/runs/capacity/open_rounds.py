"""How many rounds may be open on a node: what the disk and the memory for their payloads allow. Pure.

While voters are missing, no round becomes final, and each trained round stays open with its payloads. A node
trains on for as long as it has room for them, so a lease that must run out costs no training. The bound is local:
nodes with different bounds decide the same sets, because those that worked in a round agree on its set.
"""

import msgspec

from atoll.protocols.ledger.coverage import largest_payload
from atoll.protocols.run.arena import CHUNK, arena_of
from atoll.protocols.run.run_spec import RunSpec

LEAST_ROUNDS = 64
"""So many rounds may be open however large their payloads are: a node must outlast a slow quorum."""
MOST_ROUNDS = 1024
"""No more may be open: a lease of 60 s in rounds of 0.07 s. Each costs time at the other open rounds' events."""
MOST_PAYLOADS = 1 << 15
"""Contributions of open rounds above LEAST_ROUNDS that a daemon remembers: 2 kB each of its memory, 4.4 kB while
the payload is missing."""
PAST_PAYLOADS = 128
"""Most payloads of final rounds that a node keeps of its own: they return if it leaves its chain."""


class OpenRounds(msgspec.Struct, frozen=True):
    """One node's bound of the rounds that are not final."""

    least: int = LEAST_ROUNDS
    """Rounds ahead of the newest final one that are always allowed."""
    most: int = MOST_ROUNDS
    """Rounds ahead that are allowed while the open rounds have at most `payloads` contributions together."""
    payloads: int = MOST_PAYLOADS


ANY_DISK = OpenRounds()
"""The bound of a node whose disk has room for all payloads that it can remember."""


def open_rounds_of(spec: RunSpec, disk_bytes: int) -> OpenRounds:
    """The bound of a node that gives so many bytes of its disk to the payloads of open rounds."""
    # Where what a round does depends on the rounds before it, a late contribution has all open rounds after it
    # weighed or applied again: a member that returns to many of them would cost their square.
    each = (spec.outer.momenta, spec.outer.merge, spec.audit, spec.pace.probation_256, spec.compress.sizes)
    is_chained = any(each)
    payloads = min(MOST_PAYLOADS, disk_bytes // largest_payload(spec))
    return OpenRounds(most=LEAST_ROUNDS if is_chained else MOST_ROUNDS, payloads=payloads)


def open_payloads_of(bound: OpenRounds, members: int) -> int:
    """Most payloads of open rounds that a node keeps in a run of so many members."""
    return max(bound.least * members, min(bound.most * members, bound.payloads))


def past_payloads_of(spec: RunSpec) -> int:
    """How many payloads of final rounds a node keeps of its own: no more bytes than its error feedback has."""
    return max(1, min(PAST_PAYLOADS, 4 * arena_of(spec.model).chunks * CHUNK // largest_payload(spec)))
