"""How a run is doing, as its members say, for somebody who thinks of joining it."""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median, median_high

from atoll.node.daemon.rounds.step_budget import round_seconds
from atoll.p2p.host.interface import Host, PeerAddress
from atoll.p2p.swarm.lease_survey import read_leases
from atoll.protocols.identity import Identity
from atoll.protocols.ledger.registers import Lease
from atoll.protocols.run.run_spec import RunSpec

ASK_S = 5.0
"""Deadline of the whole question: without an answer the preview assumes, and says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutlook:
    """What the leases of a run's members say. They are signed, and may be lies."""

    members: int
    """That train or wait to, without this node."""
    round: int
    """That most of them train."""
    final: int
    """The newest that most of them know to be final; -1: none."""
    round_s: float | None
    """Median seconds that the steps of a round take them; None while nobody says."""
    tokens_per_s: float
    """Of all of them together."""

    def is_complete(self, spec: RunSpec) -> bool:
        """Whether all rounds are final: there is nothing left to train."""
        return self.final >= spec.outer.rounds - 1


def outlook_of(spec: RunSpec, leases: Collection[Lease]) -> RunOutlook | None:
    """Pure. None where there is no lease."""
    if not leases:
        return None
    took_s = [took for lease in leases if (took := round_seconds(spec, lease)) > 0]
    return RunOutlook(
        members=len(leases),
        # Medians: one that lies, or came just now, does not make the run look complete or new.
        round=median_high(lease.round for lease in leases),
        final=median_high(lease.final for lease in leases),
        round_s=median(took_s) if took_s else None,
        tokens_per_s=sum(lease.tokens_per_s for lease in leases),
    )


async def ask_outlook(
    host: Host, spec: RunSpec, identity: Identity, members: Sequence[PeerAddress]
) -> RunOutlook | None:
    """Ask the first of `members` that answers; None where none does within ASK_S."""
    try:
        async with asyncio.timeout(ASK_S):
            leases = await read_leases(host, spec.id, identity, members)
    except TimeoutError:
        return None
    return outlook_of(spec, leases.values())
