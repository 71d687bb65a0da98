"""How many bytes a member sends in a round, and receives: payloads, records, registers and what goes on beside.

The sizes below are of frames, means of whole nodes on virtual time (tests/node/virtual/test_virtual_outlook.py,
which fails if the sum is off by more than a tenth). Payloads are exact arithmetic of the RunSpec; those of reduced
rounds are in `reduced_traffic.py`.
"""

from atoll.node.runs.capacity.reduced_traffic import is_reduced, reduced_traffic, reductions_of
from atoll.p2p.gossip.push_trees import ID_BYTES, SENDERS
from atoll.protocols.ledger.coverage import exchange_bytes
from atoll.protocols.run.experts import ALL, bitmap_of
from atoll.protocols.run.model_spec import ModelSpec
from atoll.protocols.run.run_spec import RunSpec

COPY_SHARE = 1.005
"""A payload's copy on the wire over its size: manifest, requests and frames."""
ENTRIES = 4
"""Entries that a member writes in a round: contribution, acknowledgement, votes."""
ENTRIES_BYTES = 1066
"""All of these together, each in a notice."""
ROOT_BYTES = 34
"""The Merkle root of a payload's rows, which contributions have in runs that may reduce."""
REDUCTION_BYTES = 400
"""A Reduction in a notice, which each reducer writes in a reduced round."""
LEASE_BYTES = 264
"""A lease in a notice, without a name, which adds at most an eighth where a letter is one byte. One begins each
round, and one is due every third of `pace.lease_s`."""
EXCHANGE_BYTES_S = 25.2
"""Bytes a second for each author: exchanges of ledger and registers, which name the newest of everybody."""
PING_BYTES_S = 8.0
"""Bytes a second for each other member: pings and answers."""


def payload_traffic(spec: RunSpec, members: int, experts: int | None = None) -> int:
    """Payload bytes of a round that is not reduced, each way: everybody's.

    Where rounds exchange fragments, their mean. `experts`: of each layer, that a member trains; None: all.
    """
    return exchange_bytes(spec, bitmap_of_first(spec.model, experts)) // spec.outer.fragments * (members - 1)


def record_traffic(spec: RunSpec, members: int, round_s: float) -> float:
    """Bytes of a round that are no payloads, each way, where all members are connected with each other.

    A record reaches a member from SENDERS neighbours; the others announce its id alone.
    """
    others, leases = members - 1, 1 + int(3 * round_s / spec.pace.lease_s)
    reductions = reductions_of(spec, members) / members
    written = ENTRIES_BYTES + (ROOT_BYTES if spec.reduce else 0) + reductions * REDUCTION_BYTES
    pushed = min(SENDERS, others) * others * (written + leases * LEASE_BYTES)
    announced = ID_BYTES * members * (ENTRIES + reductions + leases) * max(0, others - SENDERS)
    exchanged = EXCHANGE_BYTES_S * members * min(others, 1) * round_s
    return pushed + announced + exchanged + PING_BYTES_S * others * round_s


def round_bytes(spec: RunSpec, members: int, round_s: float, experts: int | None = None) -> int:
    """All bytes of a round, each way, of a member with a model."""
    records = record_traffic(spec, members, round_s)
    if is_reduced(spec, members):
        return int(reduced_traffic(spec, members) + records)
    return int(COPY_SHARE * payload_traffic(spec, members, experts) + records)


def bitmap_of_first(model: ModelSpec, experts: int | None) -> bytes:
    """The bitmap of the first `experts` experts. All bitmaps with as many experts have one payload size."""
    return ALL if experts is None else bitmap_of(range(experts), model.expert_count)
