"""What the daemon's user may see and do (`control.Operator`): views of the parts, and orders to the driver."""

import importlib.metadata
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import msgspec

from atoll.node.daemon.rounds.queries import reason, untrained
from atoll.node.daemon.rounds.state import Phase
from atoll.p2p.swarm.connections import PeerView
from atoll.protocols.ledger.registers import Lease
from atoll.protocols.local.control_messages import (
    EvaluationResult,
    LimitUse,
    PeerStatus,
    RelayUse,
    RoundStatus,
    Status,
)
from atoll.protocols.local.worker_messages import EvaluateReply, EvaluateRequest, TrainProgress

if TYPE_CHECKING:
    from atoll.node.daemon.app import Daemon


class DaemonOperator:
    """Answers the control socket for one daemon."""

    def __init__(self, daemon: "Daemon") -> None:
        self._daemon = daemon
        self._version = importlib.metadata.version("atoll")

    def status(self) -> Status:
        """The node now."""
        d, driver = self._daemon, self._daemon.driver
        row = d.log.newest_closed()
        paths = Counter(peer.path for peer in d.swarm.peers() if peer.connected and peer.path)
        moved, blobs, progress = d.host.statistics(), d.swarm.blobs.statistics(), driver.progress
        training = driver.round.phase is Phase.TRAIN
        own = d.log.newest_trained()
        return Status(
            version=self._version,
            pid=os.getpid(),
            uptime_s=time.monotonic() - d.started_at,
            peer=d.identity.peer_id,
            name=d.config.name or f"…{d.identity.peer_id[-8:]}",
            addresses=d.addresses,
            run=d.spec.id.hex(),
            run_name=d.spec.name,
            activity=driver.round.phase.value,
            reason=self._reason(),
            eta_s=_eta_s(progress, driver.round.step_s) if training else None,
            round=min(driver.round.round, d.spec.outer.rounds - 1),
            rounds=d.spec.outer.rounds,
            step=progress.step if progress and training else 0,
            steps=progress.steps
            if progress and training
            else d.spec.steps(min(driver.round.round, d.spec.outer.rounds - 1)),
            final=max(-1, driver.finals.applied),
            digest=row.digest if row else "",
            contributors=tuple(row.contributors) if row else (),
            experts=driver.share.trained,
            members=len(d.swarm.live(Lease)),
            peers=len(d.swarm.neighbours()),
            paths=dict(paths),
            train_loss=progress.loss if progress and training else own.train_loss if own else None,
            val_bpb=d.log.newest_bpb(),
            tokens_per_s=progress.tokens_per_s if progress else None,
            payload_bytes=own.payload_bytes if own else None,
            bytes_up=moved.bytes_up,
            bytes_down=moved.bytes_down,
            train_s=own.train_s if own else None,
            wait_s=own.wait_s if own else None,
            overlap_allowed=driver.round.ahead.chosen,
            overlapped=own.overlapped if own else None,
            held_s=own.held_s if own else None,
            device=d.config.device,
            worker_pid=d.trainer.statistics().pid,
            worker_restarts=d.trainer.statistics().restarts,
            host_restarts=moved.restarts,
            trouble=self._trouble(),
            goodput=d.timekeeper.report(),
            room=d.room,
            shortage=driver.round.shortage,
            tokens=d.log.tokens,
            blob_bytes_up=blobs.bytes_up,
            blob_bytes_down=blobs.bytes_down,
            web=d.web.url,
            web_trouble=d.web.trouble,
            **self._network(),
        )

    def _network(self) -> dict[str, Any]:
        """How others reach us, and whom we relay for."""
        routes = self._daemon.host.routes()
        relay = routes.relay
        return {
            "reachability": routes.reach,
            "reachability_why": routes.why,
            "observed": routes.observed,
            "relaying": relay is not None,
            "relay": RelayUse(**asdict(relay)) if relay else None,
            "clock_ahead_s": routes.clock_ahead_s,
            "seeds": self._daemon.swarm.discovery_table(),
            "limits": LimitUse(**asdict(self._daemon.limited.limits())),
        }

    async def peers(self) -> Sequence[PeerStatus]:
        """All known peers."""
        leases = self._daemon.net.leases()
        return [self._peer_row(row, *leases.get(row.peer, (None, 0.0))) for row in self._daemon.swarm.peers()]

    def rounds(self, last: int) -> Sequence[RoundStatus]:
        """The newest `last` rows, oldest first."""
        rows = self._daemon.log.rows
        newest = [rows[number] for number in sorted(rows)[-last:]]
        return msgspec.convert(newest, list[RoundStatus], from_attributes=True)

    async def stop(self, *, finish: bool) -> str:
        """Begin to stop."""
        self._daemon.stop(finish=finish)
        return "stopping after this round" if finish else "stopping"

    async def pause(self, reason: str) -> str:
        """Start no further round."""
        self._daemon.driver.pause(reason)
        return "the round at hand is finished, then the node pauses"

    async def resume(self) -> str:
        """Go on."""
        self._daemon.driver.resume()
        return "going on at the round where the others are"

    async def evaluate(self) -> EvaluationResult:
        """Validation loss of the view."""
        found = await self._daemon.driver.ask(EvaluateRequest(), EvaluateReply)
        row = self._daemon.log.newest_closed()
        return EvaluationResult(row.round if row else -1, found.val_bpb, found.val_loss)

    def _reason(self) -> str:
        driver = self._daemon.driver
        if not driver.worker_ready:
            return driver.round.syncing or "the worker is starting"
        text = driver.waiting or reason(driver.round)
        if driver.round.phase is not Phase.SYNC:
            return text
        table = self._daemon.swarm.discovery_table()
        return f"{text}: " + "; ".join(f"{seed} {state}" for seed, state in table.items()) if table else text

    def _trouble(self) -> str:
        swarm = self._daemon.swarm
        refusal = next(iter(swarm.refusals.values()), "")
        driver = self._daemon.driver
        own = driver.trouble or untrained(driver.round) or (swarm.local_fault.line() if swarm.local_fault else "")
        return own or (f"peers do not admit this node: {refusal}" if refusal else "")

    def _peer_row(self, row: PeerView, lease: Lease | None, left_s: float) -> PeerStatus:
        return PeerStatus(
            peer=row.peer,
            path=row.path,
            maddr=row.maddr,
            rtt_s=row.rtt_s,
            member=lease is not None,
            activity=lease.activity if lease else "",
            round=lease.round if lease else None,
            final=lease.final if lease else None,
            tokens_per_s=lease.tokens_per_s if lease else None,
            heard_s=max(0.0, self._daemon.spec.pace.lease_s - left_s) if lease else None,
            faults=row.faults,
        )


def _eta_s(progress: TrainProgress | None, step_s: float) -> float | None:
    """Of the steps that are left; None before the first one, and before the first round."""
    return step_s * (progress.steps - progress.step) if progress and step_s else None
