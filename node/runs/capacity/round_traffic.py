"""How many bytes a member sends in a round, and receives: payloads, records, registers and what goes on beside.

The sizes below are of frames, means of whole nodes on virtual time (tests/node/virtual/test_virtual_outlook.py,
which fails if the sum is off by more than a tenth). Payloads are exact arithmetic of the RunSpec. Of
reduced rounds openings, proofs and what a slice costs that counts raw are not in it: the sum is too low there.
"""

from atoll.p2p.gossip.push_trees import ID_BYTES, SENDERS
from atoll.protocols.ledger.coverage import exchange_bytes
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.experts import ALL, bitmap_of
from atoll.protocols.run.model_spec import ModelSpec
from atoll.protocols.run.payload import payload_bytes
from atoll.protocols.run.run_spec import RunSpec

COPY_SHARE = 1.005
"""A payload's copy on the wire over its size: manifest, requests and frames."""
ENTRIES = 4
"""Entries that a member writes in a round: contribution, acknowledgement, votes."""
ENTRIES_BYTES = 1066
"""All of these together, each in a notice."""
LEASE_BYTES = 264
"""A lease in a notice, without a name, which adds at most an eighth where a letter is one byte. One begins each
round, and one is due every third of `pace.lease_s`."""
EXCHANGE_BYTES_S = 25.2
"""Bytes a second for each author: exchanges of ledger and registers, which name the newest of everybody."""
PING_BYTES_S = 8.0
"""Bytes a second for each other member: pings and answers."""


def payload_traffic(spec: RunSpec, members: int, experts: int | None = None) -> int:
    """Payload bytes of a round, each way: everybody's, or in a reduced round one and as much again, reduced.

    Where rounds exchange fragments, their mean. `experts`: of each layer, that a member trains; None: all.
    """
    payload = exchange_bytes(spec, bitmap_of_first(spec.model, experts)) // spec.outer.fragments
    if spec.reduce is None or members <= spec.reduce.above:
        return payload * (members - 1)
    return payload + payload_bytes(spec.compress.codec, arena_of(spec.model).chunks, spec.reduce.k)


def record_traffic(spec: RunSpec, members: int, round_s: float) -> float:
    """Bytes of a round that are no payloads, each way, where all members are connected with each other.

    A record reaches a member from SENDERS neighbours; the others announce its id alone.
    """
    others, leases = members - 1, 1 + int(3 * round_s / spec.pace.lease_s)
    pushed = min(SENDERS, others) * others * (ENTRIES_BYTES + leases * LEASE_BYTES)
    announced = ID_BYTES * members * (ENTRIES + leases) * max(0, others - SENDERS)
    exchanged = EXCHANGE_BYTES_S * members * min(others, 1) * round_s
    return pushed + announced + exchanged + PING_BYTES_S * others * round_s


def round_bytes(spec: RunSpec, members: int, round_s: float, experts: int | None = None) -> int:
    """All bytes of a round, each way, of a member with a model."""
    return int(COPY_SHARE * payload_traffic(spec, members, experts) + record_traffic(spec, members, round_s))


def bitmap_of_first(model: ModelSpec, experts: int | None) -> bytes:
    """The bitmap of the first `experts` experts. All bitmaps with as many experts have one payload size."""
    return ALL if experts is None else bitmap_of(range(experts), model.expert_count)
