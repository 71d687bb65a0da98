"""How far a run is: as its members say, for somebody who thinks of joining it; and in its schedule."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_high

from msgspec import UNSET

from atoll.node.daemon.steps.arrival import round_seconds
from atoll.p2p.host.interface import Host, PeerAddress
from atoll.p2p.swarm.lease_survey import read_leases
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId
from atoll.protocols.ledger.registers import Lease
from atoll.protocols.local.progress import RateNow
from atoll.protocols.run.learning_rate import learning_rate
from atoll.protocols.run.run_spec import InnerSpec, RunSpec

_WORKING = "training", "syncing"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutlook:
    """What the leases of a run's members say. They are signed, and may be lies."""

    members: int
    """With a lease, without this node."""
    idle: int
    """Of them, those that train nothing now: paused, done, leaving, or here for something else."""
    round: int
    """That most of them train."""
    final: int
    """The newest that most of them know to be final; -1: none."""
    round_s: float | None
    """Median seconds that the steps of a round take them; None while nobody says."""
    tokens_per_s: float
    """Of all together that train now."""
    loss: float | None
    """Median training loss of their newest rounds, nats per token; None while nobody says."""
    pace_s: float | None
    """Median seconds from one round to the next, waiting included; None while nobody says."""
    owner_final: int | None
    """The newest round that the run's owner knows to be final; None where its lease is not known."""

    def is_complete(self, spec: RunSpec) -> bool:
        """Whether the owner says that all rounds are final: anybody can make up other members."""
        return self.owner_final is not None and self.owner_final >= spec.outer.rounds - 1


def outlook_of(spec: RunSpec, known: Mapping[PeerId, Lease]) -> RunOutlook | None:
    """Pure. None where there is no lease."""
    if not known:
        return None
    leases, owners = known.values(), known.get(spec.owner)
    return RunOutlook(
        members=len(leases),
        idle=sum(lease.activity not in _WORKING for lease in leases),
        # Medians: one that lies, or came just now, changes little.
        round=median_high(lease.round for lease in leases),
        final=median_high(lease.final for lease in leases),
        round_s=_median(round_seconds(spec, lease) for lease in leases),
        loss=_median(lease.loss for lease in leases),
        pace_s=_median(lease.round_s for lease in leases),
        tokens_per_s=sum(lease.tokens_per_s for lease in leases if lease.activity in _WORKING),
        owner_final=owners.final if owners else None,
    )


def _median(said: Iterable[float]) -> float | None:
    """Of what is said; 0 says nothing."""
    known = [value for value in said if value > 0]
    return median(known) if known else None


async def ask_outlook(
    host: Host, spec: RunSpec, identity: Identity, members: Sequence[PeerAddress]
) -> RunOutlook | None:
    """Ask all of `members` at once; None where none answers in a few seconds."""
    return outlook_of(spec, await read_leases(host, spec.id, identity, members))


def rate_now(inner: InnerSpec, step: int) -> RateNow:
    """The rate of the run's inner step `step`, from 0, and the part of the schedule that it is in."""
    warm, end = inner.warmup_steps - inner.first_step, inner.total_steps - inner.first_step
    if step < warm:
        phase, until = "warm-up", warm
    elif inner.decay_256 == 0:
        phase, until = "stable", None
    elif step >= end:
        phase, until = "at its least", None
    elif inner.decay_256 is UNSET:
        phase, until = "cosine", end
    elif step < end - inner.decay_steps:
        phase, until = "stable", end - inner.decay_steps
    else:
        phase, until = "decay", end
    return RateNow(rate=learning_rate(inner, step), phase=phase, step=step, until=until)
