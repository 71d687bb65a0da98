"""What the daemon's user may see and do (`protocols.local.operator`): views of the parts, orders to the driver."""

import importlib.metadata
import os
import time
from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from typing import Any, Protocol

from msgspec.structs import replace

from atoll.node.daemon.core.interfaces import NodeControl
from atoll.node.daemon.join_plan import JoinPlan
from atoll.node.daemon.loggers.feed import LoggerFeed
from atoll.node.daemon.rounds.queries import must_wait, pause_line, reason, resume_line, untrained, waits_s
from atoll.node.daemon.rounds.state import Phase, RoundState
from atoll.node.daemon.standing_still.absent_members import unsettled, with_absences
from atoll.node.daemon.swarm_adapter import SwarmNetwork
from atoll.node.daemon.telemetry.collector import GoodputCollector
from atoll.node.daemon.telemetry.round_log import RoundLog, sent_per_round
from atoll.node.daemon.telemetry.run_outlook import rate_now
from atoll.node.daemon.web.page_access import TOKEN_S, PageAccess
from atoll.node.daemon.web.server import WebServer
from atoll.node.guest.watch import GuestWatch
from atoll.node.ipc.worker_process import Trainer
from atoll.p2p.discovery.seed_table import short_texts
from atoll.p2p.limits.config import GivenRates
from atoll.p2p.limits.limited_host import LimitedHost
from atoll.p2p.nat.route_host import RouteHost
from atoll.p2p.swarm.connections import PeerView
from atoll.p2p.swarm.swarm import Swarm
from atoll.protocols.errors import ConfigError
from atoll.protocols.ids import Round
from atoll.protocols.ledger.registers import Lease
from atoll.protocols.local import control_messages
from atoll.protocols.local.mentioned import names_in
from atoll.protocols.local.privacy_now import PrivacyNow
from atoll.protocols.local.progress import WorkProgress
from atoll.protocols.local.standing import LedgerUse
from atoll.protocols.local.worker_messages import TrainProgress
from atoll.protocols.run.sections.privacy import epsilon

SHORTEST = 6
"""Fewest characters by which a user may name a peer: what the tables show of its PeerID."""
STARTING, FETCHING, STOPPING = "the worker is starting", "fetching from other members", "the node stops"
BRIEF_S = 1.0
"""A download that took less is not yet what a node waits for."""
SENT_ROUNDS = 100
"""What is sent in a round is an average over so many of the newest ones."""


class StopDaemon(Protocol):
    """See `Daemon.stop`."""

    def __call__(self, *, finish: bool = False) -> None:
        """Begin to stop."""


def speed_of(row: control_messages.RoundStatus | None) -> float | None:
    """Tokens per second of a round that this node trained; None where that is not known."""
    return row.tokens / row.train_s if row and row.tokens and row.train_s > 0 else None


def until(for_s: float | None, now: datetime) -> str:
    """The end of a pause for its reason, in the user's time; empty for one that does not end by itself."""
    if for_s is None:
        return ""
    return f", until {now + timedelta(seconds=for_s):{'%H:%M' if for_s < 86400 else '%Y-%m-%d %H:%M'}}"


class HasDriver(Protocol):
    """Who holds the driver of the chain that the node is in; `CurrentChain` does."""

    @property
    def driver(self) -> NodeControl:
        """Return it; another one from each change of the chain on."""


@dataclass(frozen=True, kw_only=True)
class DaemonOperator:
    """Answers the control socket and the web page of one daemon."""

    plan: JoinPlan
    log: RoundLog
    host: RouteHost
    limited: LimitedHost
    swarm: Swarm
    net: SwarmNetwork
    chain: HasDriver
    trainer: Trainer
    goodput: GoodputCollector
    web: WebServer
    access: PageAccess
    loggers: LoggerFeed
    guest: GuestWatch
    stop_daemon: StopDaemon
    started_s: float = field(default_factory=time.monotonic)
    version: str = field(default_factory=lambda: importlib.metadata.version("atoll"))

    @property
    def control(self) -> NodeControl:
        """The driver."""
        return self.chain.driver

    def status(self) -> control_messages.Status:
        """The status of the node at this moment."""
        node, log, config = self.control.view(), self.log, self.plan.config
        spec, me, live = self.plan.run.spec, self.plan.identity.peer_id, self.swarm.live(Lease)
        own, (final, agreed) = log.newest_trained(), self._agreed()
        blobs, worker, progress = self.swarm.blobs.statistics(), self.trainer.statistics(), node.progress
        number = min(self._round(final), spec.outer.rounds - 1)
        # What an inner step reported is of the round at hand only while one is trained.
        at_work = progress if node.round.phase is Phase.TRAIN else None
        now = control_messages.Status(
            version=self.version,
            pid=os.getpid(),
            uptime_s=time.monotonic() - self.started_s,
            peer=me,
            name=config.name,
            addresses=self.swarm.addresses,
            run=spec.id.hex(),
            run_name=spec.name,
            activity=node.round.phase.value,
            **self._waits(at_work, node.round),
            round=number,
            rounds=spec.outer.rounds,
            step=at_work.step if at_work else 0,
            steps=at_work.steps if at_work else spec.steps(number),
            final=final,
            digest=agreed.digest if agreed else "",
            contributors=tuple(agreed.contributors) if agreed else (),
            experts=node.experts,
            members=len(live.keys() - node.left),
            peers=len(self.swarm.neighbours()),
            paths=dict(Counter(peer.path for peer in self.swarm.peers() if peer.connected and peer.path)),
            train_loss=at_work.loss if at_work else own.train_loss if own else None,
            tokens_per_s=progress.tokens_per_s if progress else speed_of(own),
            learning_rate=rate_now(spec.inner, spec.steps_before(number) + (at_work.step if at_work else 0)),
            payload_bytes=own.payload_bytes if own else None,
            train_s=own.train_s if own else None,
            wait_s=own.wait_s if own else None,
            overlap_allowed=node.round.ahead.chosen,
            overlapped=own.overlapped if own else None,
            held_s=own.held_s if own else None,
            device=config.device,
            worker_pid=worker.pid,
            worker_restarts=worker.restarts,
            trouble=self._trouble(),
            goodput=self.goodput.report(),
            room=self.plan.room,
            shortage=node.round.shortage,
            tokens=log.tokens,
            blob_bytes_up=blobs.bytes_up,
            blob_bytes_down=blobs.bytes_down,
            web=self.web.url,
            web_trouble=self.web.trouble,
            loggers=self.loggers.states(),
            ledger=self._ledger(),
            privacy=self._privacy(node.uses, is_spent=node.round.is_spent),
            **self._validation(),
            **self._network(),
            **self._standings(),
        )
        return replace(now, names=names_in(now, live))

    def _agreed(self) -> tuple[int, control_messages.RoundStatus | None]:
        """The newest final round that this node has, and its row; -1 and None before the first."""
        node = self.control.view()
        newest = None if node.is_worker_ready else self.log.newest_final()
        # A worker that still loads has not said yet how far it is. What was final when the node ended still is.
        final = max(-1, node.applied, newest.round if newest else -1)
        row = self.log.rows.get(final)
        return final, row if row and row.final else None

    def _round(self, final: int) -> int:
        """The round at hand; until the round machine has found it after a start, the first one that can be it."""
        known, own = self.control.view().round, self.log.newest_trained()
        if known.phase not in (Phase.SYNC, Phase.CATCH_UP):
            return known.round
        return max(known.round, final + 1, own.round + 1 if own else 0)

    def _standings(self) -> dict[str, Any]:
        """Who is excluded, or may be, who counts less than in full, and whose vote or return matters."""
        view, me = self.control.view(), self.plan.identity.peer_id
        others = self.net.leases().keys() - {me}
        return {
            "excluded": view.excluded,
            "votes_against": view.votes_against,
            "standing": view.standings.of(me)[0],
            "diminished": view.standings.diminished(others),
            "unsettled": unsettled(view.standings.finality(), self.net.leases),
        }

    def _privacy(self, uses: int | None, *, is_spent: bool) -> PrivacyNow | None:
        agreed = self.plan.run.spec.privacy
        if not agreed or not self.plan.config.work.trains or uses is None:
            return None  # unknown is not 0: ε never falls
        found = epsilon(uses, agreed.noise, agreed.delta)
        return PrivacyNow(epsilon=found, delta=agreed.delta, uses=uses, most=agreed.most or None, spent=is_spent)

    def _validation(self) -> dict[str, Any]:
        """The newest value, whose it is, and what this node does besides training."""
        newest = self.log.newest_validated()
        return {
            "val_bpb": newest.val_bpb if newest else None,
            "val_round": newest.round if newest else None,
            "val_by": newest.val_by if newest else "",
            "roles": self.plan.config.roles or ("train",),
            "validated": self.control.view().validated,
        }

    def _ledger(self) -> LedgerUse:
        newcomers = self.swarm.newcomers
        accepted, worked, new = newcomers.counts
        return LedgerUse(
            accepted=accepted,
            worked=worked,
            new=new,
            places=newcomers.quota.authors,
            pruned=newcomers.pruned,
            disk_bytes=self.swarm.ledger.disk_bytes,
            records_from=self.control.view().records_from,
        )

    def _network(self) -> dict[str, Any]:
        """How others reach us, whom we relay for, and what we send."""
        routes, moved = self.host.routes(), self.host.statistics()
        relay = routes.relay
        return {
            "reachability": routes.reach,
            "reachability_why": routes.why,
            "observed": routes.observed,
            "bytes_up": moved.bytes_up,
            "bytes_down": moved.bytes_down,
            "host_restarts": moved.restarts,
            "port_map": moved.port_map,
            "sent": sent_per_round(self._newest_rows(SENT_ROUNDS), 4 * self.plan.run.spec.model.parameters),
            "relaying": relay is not None,
            "relay": control_messages.RelayUse(**asdict(relay)) if relay else None,
            "clock_ahead_s": routes.clock_ahead_s,
            "seeds": self.swarm.discovery_table(),
            "limits": control_messages.LimitUse(**asdict(self.limited.limits())),
        }

    async def peers(self) -> Sequence[control_messages.PeerStatus]:
        """All known peers."""
        view = self.control.view()
        leases = {peer: lease for peer, lease in self.net.leases().items() if peer not in view.left}
        excluded = {one.peer: one.round for one in view.excluded}
        votes = {one.peer: one.votes for one in view.votes_against}
        known, standings = self.swarm.peers(), view.standings
        rows = [
            replace(
                self._peer_row(row, *leases.get(row.peer, (None, 0.0))),
                excluded_from=excluded.get(row.peer),
                votes_against=votes.get(row.peer, 0),
                standing=standing if row.peer in leases else None,
            )
            for row, standing in zip(known, standings.of(*(row.peer for row in known)), strict=True)
        ]
        return with_absences(rows, standings.finality())

    def still_s(self) -> float:
        """Seconds since a step, a round or the activity of this node changed."""
        return self.control.view().still_s

    def rounds(self, last: int) -> Sequence[control_messages.RoundStatus]:
        """The newest `last` rows, oldest first."""
        return [copy(row) for row in self._newest_rows(last)]

    def _newest_rows(self, last: int) -> list[control_messages.RoundStatus]:
        """The log's own rows, which change as rounds go on."""
        return [self.log.rows[number] for number in sorted(self.log.rows)[-last:]]

    async def stop(self, *, finish: bool) -> str:
        """Begin to stop."""
        self.stop_daemon(finish=finish)
        return "stopping after this round" if finish else "stopping"

    async def pause(self, reason: str, for_s: float | None) -> str:
        """Start no further round, for so many seconds or until `resume`."""
        view, end = self.control.view(), until(for_s, datetime.now())
        is_excluded = any(one.peer == self.plan.identity.peer_id for one in view.excluded)
        self.control.pause(reason, None if is_excluded else for_s)  # an excluded node rests for good
        return pause_line(view.round, end)

    async def resume(self) -> str:
        """Continue training after a pause."""
        line = resume_line(self.control.view().round)
        self.control.resume()
        return line

    async def limit(self, up: str | None, down: str | None) -> str:
        """Change the rates of traffic until the node ends. Raises ConfigError."""
        self.limited.set_rates(GivenRates(up=up, down=down))
        return "these limits hold until the node ends" if up or down else "the configuration's limits hold again"

    def page_token(self) -> control_messages.PageToken:
        """A token for one browser on this machine."""
        return control_messages.PageToken(self.access.issue() if self.web.url else "", TOKEN_S)

    async def exclude(self, peer: str, first: int | None, reason: str, since: int | None) -> str:
        """Exclude a member from the run. Raises ConfigError, LocalFault."""
        known = {*self.swarm.ledger.vector(), *(row.peer for row in self.swarm.peers())}
        found = [one for one in known if one == peer or (len(peer) >= SHORTEST and one.endswith(peer))]
        if len(found) != 1:
            many = "nobody" if not found else f"{len(found)} peers"
            raise ConfigError(f"{many} known here: {peer!r}", hint="`atoll peer list --json` has whole PeerIDs")
        rounds = [None if number is None else Round(number) for number in (first, since)]
        return self.control.exclude(found[0], rounds[0], reason, rounds[1])

    async def evaluate(self) -> control_messages.EvaluationResult:
        """Validation loss of the view. Raises ConfigError where there is none."""
        if not self.plan.config.work.has_model:
            raise ConfigError("this node holds no model: its role is relay", hint="ask another node")
        found = await self.control.evaluate()
        row = self.log.newest_of(found.state)
        return control_messages.EvaluationResult(row.round if row else -1, found.val_bpb, found.val_loss)

    def _reason(self) -> str:
        node = self.control.view()
        if not node.is_worker_ready and self.plan.config.work.has_model:
            if self.trainer.is_stopping:
                return STOPPING
            starts = self.trainer.starting()
            return node.round.syncing or (f"{STARTING}: {starts.work}" if starts else STARTING)
        text = node.waiting or reason(node.round, node.progress)
        # Made when it is asked for: the clock that ends a pause stands while a laptop sleeps.
        if node.round.phase is Phase.PAUSED and (end_s := node.round.rest_until) is not None:
            text += until(end_s - node.round.now, datetime.now())
        if node.waiting or node.round.phase is not Phase.SYNC:
            return text
        seeds = short_texts([row for row in self.swarm.discovery.rows() if not row.via])
        # The DHT's own state is of use where there is no seed. `atoll doctor` has addresses and remedies.
        known = seeds or [f"{name} {state}" for name, state in self.swarm.discovery_table().items()]
        return f"{text}: {'; '.join(known)}" if known else text

    def _waits(self, at_work: TrainProgress | None, state: RoundState) -> dict[str, Any]:
        """Why nothing is trained, how far that is, and for how long."""
        work = self._progress()
        eta_s = work.left_s if work else self._eta_s(at_work, state)
        return {"reason": self._reason(), "eta_s": eta_s, "progress": work}

    def _progress(self) -> WorkProgress | None:
        """Work without which nothing is trained now: a download, else the start of the worker."""
        node = self.control.view()
        needs_worker = self.plan.config.work.has_model and not node.is_worker_ready
        if not (needs_worker or node.waiting or node.round.phase is Phase.CATCH_UP):
            return None
        # Payloads of open rounds are fetched as well: what is waited for longest is the largest, and not brief.
        found = self.swarm.blobs.largest_download()
        if found is None or found.took_s < BRIEF_S:
            return self.trainer.starting() if needs_worker else None
        return WorkProgress(
            work=FETCHING,
            done_bytes=found.done_bytes,
            of_bytes=found.of_bytes,
            took_s=found.took_s,
            left_s=found.left_s,
        )

    def _eta_s(self, progress: TrainProgress | None, state: RoundState) -> float | None:
        """Seconds for the steps that are left, or of what the node waits for; None where nothing was measured."""
        if state.phase is Phase.PAUSED and state.held and not state.resting:
            return self.guest.left_s()
        if progress is None or must_wait(state):
            return waits_s(state)
        left_s = state.step_s * (progress.steps - progress.step)
        # On a full disk the work waits for room beside its last step.
        return left_s if state.step_s and self.still_s() <= left_s + BRIEF_S else None

    def _trouble(self) -> str:
        node, replication = self.control.view(), self.swarm.replication
        refusal = replication.refusal  # one peer that stores our work is enough: a liar's words are no trouble
        fault = replication.local_fault
        is_owner = self.plan.run.spec.owner == self.plan.identity.peer_id
        if is_owner and not self.plan.config.work.has_model and node.applied < 0:
            return "round 0 waits for this node, the run's owner, which holds no model: give it another --role"
        return (
            node.trouble
            or self.trainer.trouble
            or node.standings.trouble()
            or untrained(node.round)
            or (fault.line() if fault else "")
            or (f"peers do not admit this node: {refusal}" if refusal else "")
            or node.frozen
            or node.missing
            or self.guest.trouble
        )

    def _peer_row(self, row: PeerView, lease: Lease | None, left_s: float) -> control_messages.PeerStatus:
        return control_messages.PeerStatus(
            peer=row.peer,
            path=row.path,
            maddr=row.maddr,
            rtt_s=row.rtt_s,
            member=lease is not None,
            activity=lease.activity if lease else "",
            round=lease.round if lease else None,
            final=lease.final if lease else None,
            tokens_per_s=lease.tokens_per_s if lease else None,
            heard_s=max(0.0, self.plan.run.spec.pace.lease_s - left_s) if lease else None,
            faults=row.faults,
            name=lease.name if lease else "",
        )
