"""Faults that others report: a report counts once its proof was checked here, with the RunSpec alone.

A proven fault is remembered against the reducer too: none of its Reductions is believed any more.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from atoll.node.daemon.core.interfaces import Network
from atoll.p2p.blobs.asking import peers_to_ask
from atoll.protocols.errors import AtollError, DecodeError, PeerFault
from atoll.protocols.ids import Digest, PeerId
from atoll.protocols.ledger.records import MAX_SET, ReductionFault
from atoll.protocols.ledger.reduction import ReductionRules, proof_max_bytes
from atoll.protocols.local.worker_messages import JudgeReply, JudgeRequest

log = logging.getLogger(__name__)

FETCH_S = 60.0
ATTEMPTS = 5
RETRY_S = 2.0


@dataclass(kw_only=True)
class FaultReports:
    """Reports of faults, the proofs that they name, and which Reductions are proven wrong."""

    net: Network
    rules: ReductionRules
    ask: Callable[[JudgeRequest, type[JudgeReply]], Awaitable[JudgeReply]]
    on_fault: Callable[[PeerId, AtollError], None]
    wrong: frozenset[Digest] = frozenset()
    """Reductions with a checked proof against them, or with an illegal payload."""
    _reports: dict[tuple[PeerId, Digest], ReductionFault] = field(default_factory=dict)
    _false_reporters: set[PeerId] = field(default_factory=set)
    """Peers that reported a fault without a valid proof."""
    _turns: WeakValueDictionary[PeerId, asyncio.Lock] = field(default_factory=WeakValueDictionary)

    def add_report(self, author: PeerId, fault: ReductionFault) -> bool:
        """Record a reported fault. Returns whether to check it: one report of an author about each Reduction."""
        return self._reports.setdefault((author, fault.reduction), fault) is fault

    def proofs(self, first: int = 0) -> set[Digest]:
        """Return the blobs that are reported as proofs of faults of this round or a later one."""
        return {fault.proof for fault in self._reports.values() if fault.round >= first}

    def forget(self, before: int) -> None:
        """Forget the rounds before this one, whose payloads are dropped."""
        self._reports = {key: fault for key, fault in self._reports.items() if fault.round >= before}

    def forget_author(self, author: PeerId) -> None:
        """Forget what an author reported and nothing proved: what it wrote is gone."""
        kept = self._reports.items()
        self._reports = {key: fault for key, fault in kept if key[0] != author or key[1] in self.wrong}
        self._false_reporters.discard(author)

    async def check(self, author: PeerId, fault: ReductionFault) -> bool:
        """Check a report. Returns whether its Reduction is now known to be wrong, and was not before.

        A check fetches the proof. So an author gets one at a time, and none after a report that proves nothing.
        """
        turn = self._turns.setdefault(author, asyncio.Lock())
        async with turn:
            return await self._check_often(author, fault)

    async def _check_often(self, author: PeerId, fault: ReductionFault) -> bool:
        if fault.reduction in self.wrong or author in self._false_reporters:
            return False
        for _ in range(ATTEMPTS):
            try:
                is_wrong = await self._check_once(author, fault)
            except PeerFault as error:
                self._false_reporters.add(author)
                self.on_fault(author, error)
                return False
            except (AtollError, TimeoutError) as error:
                # Not the reporter's fault: it may be unreachable, or this node's worker may have died.
                log.debug("proof of a fault: %s", error)
                await asyncio.sleep(RETRY_S)
                continue
            if is_wrong:
                self.wrong |= {fault.reduction}
                self._reports[author, fault.reduction] = fault  # its author may be gone, and its proof is here
            else:
                self._false_reporters.add(author)
                self.on_fault(author, DecodeError("a proof of a fault that proves nothing"))
            return is_wrong
        return False

    async def _check_once(self, author: PeerId, fault: ReductionFault) -> bool:
        cap, was_held = proof_max_bytes(self.rules, MAX_SET), self.net.has_blob(fault.proof)
        if not was_held:
            async with asyncio.timeout(FETCH_S):
                await self.net.fetch_blob(fault.proof, peers_to_ask(author, self.net.neighbours()), cap)
        is_wrong = False
        try:
            ask = JudgeRequest(str(self.net.blob_path(fault.proof)), fault.reduction)
            is_wrong = (await self.ask(ask, JudgeReply)).wrong
        finally:
            # A blob that was here before has another use. A valid proof stays: this node serves it to others.
            if not is_wrong and not was_held:
                self.net.delete_blob(fault.proof)
        return is_wrong
