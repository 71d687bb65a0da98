"""Gathers what the metrics of a node show besides its status."""

import statistics
from collections.abc import Callable, Iterable, Mapping
from functools import cache

from atoll.node.daemon.join_plan import JoinPlan
from atoll.node.daemon.swarm_adapter import SwarmNetwork
from atoll.node.daemon.telemetry.durations import NodeDurations
from atoll.node.daemon.telemetry.machine_use import disk_of
from atoll.node.daemon.web.measurements import Measurements
from atoll.node.runs.public_runs import preset_of
from atoll.protocols.ledger.registers import Lease
from atoll.protocols.run.run_spec import RunSpec


class NodeMeasurements(Measurements):
    """The measurements of one node. Its functions read the network and the disk at each scrape."""

    def __init__(
        self,
        plan: JoinPlan,
        net: SwarmNetwork,
        durations: NodeDurations,
        loggers: Callable[[], Mapping[str, tuple[int, int]]],
    ) -> None:
        """`loggers` gives the events that each logger wrote and lost."""
        super().__init__(
            model=cache(lambda: model_name(plan.run.spec)),
            durations={"step": durations.steps, "round": durations.rounds, "round_trip": durations.round_trips},
            members_final=lambda: median_final(lease for lease, _ in net.leases().values()),
            disk=lambda: disk_of(plan.home.root),
            loggers=loggers,
        )


def model_name(spec: RunSpec) -> str:
    """The preset with this run's model; `own-` and the number of parameters for another model."""
    return preset_of(spec) or f"own-{spec.model.parameters}"


def median_final(leases: Iterable[Lease]) -> int | None:
    """The median of the leases' newest final rounds, the lower one of two; None without leases.

    A minority of members that lie about their round does not move it far.
    """
    finals = [lease.final for lease in leases]
    return statistics.median_low(finals) if finals else None
