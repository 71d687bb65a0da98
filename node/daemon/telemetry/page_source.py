"""What the web page reads of the node: the reports of the control socket, and what only the page shows."""

import time
from collections.abc import Sequence
from typing import Protocol

from atoll.node.daemon.join_plan import JoinPlan
from atoll.node.daemon.telemetry.contribution_reader import ContributionReader
from atoll.node.daemon.telemetry.log_ring import event_ring, log_ring
from atoll.node.daemon.telemetry.machine_use import MachineUse
from atoll.node.daemon.telemetry.round_log import RoundLog
from atoll.node.daemon.web.page_data import PageEvent, ResourceUse, RoundWork, SampleText
from atoll.node.daemon.web.server import is_loopback
from atoll.node.runs.given_invites import ShownInvite
from atoll.node.runs.invites import own_seeds
from atoll.p2p.ledger.store import Ledger
from atoll.protocols.errors import ConfigError
from atoll.protocols.local.control_messages import LogLine, PeerStatus, RoundStatus, Status

OFF = "they are off: set sample_every_s in config.toml"


class Reports(Protocol):
    """The reports of the control socket that the page shows too."""

    def status(self) -> Status:
        """The node's current status."""

    async def peers(self) -> Sequence[PeerStatus]:
        """All known peers."""

    def still_s(self) -> float:
        """Seconds since a step, a round or the activity changed."""

    def rounds(self, last: int) -> Sequence[RoundStatus]:
        """The newest `last` rounds, oldest first."""


class ShownSample(Protocol):
    """Who writes sample texts."""

    shown: SampleText
    """The newest one, or why there is none."""


class PageSource:
    """See `atoll.node.daemon.web.site.StatusSource`."""

    def __init__(
        self, plan: JoinPlan, ledger: Ledger, log: RoundLog, reports: Reports, samples: ShownSample | None = None
    ) -> None:
        """The source of a daemon that is built from `plan`. `samples`: None where the user wants none."""
        self._samples = samples
        self.is_local = is_loopback(plan.config.web)
        self._plan = plan
        self._reports = reports
        self._log = log
        self._shown = ShownInvite(plan.home, plan.run.spec, plan.identity)
        self._contributions = ContributionReader(ledger, time.monotonic)
        self._lines = log_ring(plan.home.log)
        self._events = event_ring(log.journal)
        self._machine = MachineUse(plan.home.root, time.monotonic)

    def status(self) -> Status:
        return self._reports.status()

    async def peers(self) -> Sequence[PeerStatus]:
        return await self._reports.peers()

    def still_s(self) -> float:
        return self._reports.still_s()

    def rounds(self, last: int) -> Sequence[RoundStatus]:
        return self._reports.rounds(last)

    def rounds_before(self, number: int) -> Sequence[RoundStatus]:
        rows = self._log.rows
        return [rows[at] for at in sorted(rows) if at < number]

    def work(self, numbers: Sequence[int]) -> Sequence[RoundWork]:
        return self._contributions.work(numbers)

    def resources(self, worker_pid: int) -> ResourceUse:
        return self._machine.read(worker_pid)

    def sample(self) -> SampleText:
        return self._samples.shown if self._samples is not None else SampleText(why=OFF)

    def log_news(self, after: int) -> tuple[int, Sequence[LogLine]]:
        return self._lines.news(after)

    def event_news(self, after: int) -> tuple[int, Sequence[PageEvent]]:
        return self._events.news(after)

    def invite(self) -> str:
        """A link without a permit: every user of the machine can read the page, and a permit is a secret."""
        spec, identity = self._plan.run.spec, self._plan.identity
        if spec.admission.mode == "invite":
            raise ConfigError("an invite of this run is a secret", hint="make one with `atoll invite`")
        places = own_seeds(self._reports.status().addresses, identity.peer_id, self._plan.config.seeds)
        if not places:
            raise ConfigError("the node has no address yet", hint="try again in a moment")
        return self._shown.link(places, time.time())
