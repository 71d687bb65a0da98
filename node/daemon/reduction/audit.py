"""Audits reducers: opens random chunks of Reductions, publishes proofs of wrong ones, and checks others' proofs.

No node believes a reported fault without its proof, and the RunSpec alone is enough to check a proof.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakValueDictionary

from atoll.node.daemon.coordinator.interfaces import Network, peers_to_ask
from atoll.node.daemon.reduction.effective_set import EffectiveSlice
from atoll.node.daemon.reduction.ledger_view import ReductionLedger
from atoll.p2p.system.atomic_files import write_whole
from atoll.protocols import codec
from atoll.protocols.errors import AtollError, DecodeError, PeerFault
from atoll.protocols.ids import Digest, PeerId
from atoll.protocols.ledger.records import MAX_SET, Body, Entry, ReductionFault, encode_entry
from atoll.protocols.ledger.reduction import (
    PROOF_VERSION,
    Claim,
    FaultProof,
    Offer,
    Opening,
    OpeningAsk,
    opening_max_bytes,
    proof_max_bytes,
)
from atoll.protocols.local.worker_messages import JudgeReply, JudgeRequest
from atoll.protocols.run.payload import payload_bytes

log = logging.getLogger(__name__)

ANSWER_S = 60.0
MAX_OPENINGS = 16
"""Openings of one round that this node asks for, and of one Reduction that it gives to one member."""
ATTEMPTS = 5
RETRY_S = 2.0


@dataclass(kw_only=True)
class Auditor:
    """Samples Reductions, checks proofs, and knows which Reductions are wrong."""

    net: Network
    ledger: ReductionLedger
    spool: Path
    ask: Callable[[JudgeRequest, type[JudgeReply]], Awaitable[JudgeReply]]
    publish: Callable[[Body], Entry | None]
    on_fault: Callable[[PeerId, AtollError], None]
    rng: random.Random
    """Chooses what is opened: reducers must not know it before they publish."""
    wrong: frozenset[Digest] = frozenset()
    _reports: dict[tuple[PeerId, Digest], ReductionFault] = field(default_factory=dict)
    _openings_given: dict[tuple[PeerId, Digest], int] = field(default_factory=dict)
    _false_reporters: set[PeerId] = field(default_factory=set)
    """Peers that reported a fault without a valid proof."""
    _turns: WeakValueDictionary[PeerId, asyncio.Lock] = field(default_factory=WeakValueDictionary)

    def add_report(self, author: PeerId, fault: ReductionFault) -> bool:
        """Record a reported fault. Returns whether to check it: one report of an author about each Reduction."""
        return self._reports.setdefault((author, fault.reduction), fault) is fault

    def may_ask(self, peer: PeerId, claim: Claim) -> bool:
        """Return whether a peer gets one more opening of our Reduction: each takes the worker's time."""
        given = self._openings_given.get((peer, claim.entry), 0)
        self._openings_given[peer, claim.entry] = given + 1
        return given < MAX_OPENINGS

    def proofs(self, first: int = 0) -> set[Digest]:
        """Return the blobs that are reported as proofs of faults of this round or a later one."""
        return {fault.proof for fault in self._reports.values() if fault.round >= first}

    def forget(self, before: int) -> None:
        """Forget the rounds before this one, whose payloads are dropped."""
        self._reports = {key: fault for key, fault in self._reports.items() if fault.round >= before}
        given = self._openings_given.items()
        self._openings_given = {key: count for key, count in given if key[1] in self.ledger.claims}

    async def sample(self, parts: tuple[EffectiveSlice, ...]) -> None:
        """Open random chunks of a round's Reductions, as many as the run's share of the traffic allows."""
        claims = [part.reduced for part in parts if part.reduced is not None]
        theirs = [claim for claim in claims if claim.author != self.ledger.me]
        for _ in range(self._draws(claims) if theirs else 0):
            await self._open(self.rng.choice(theirs))

    def _draws(self, claims: list[Claim]) -> int:
        """Return how many chunks to open in a round: their traffic is the run's share of what members exchange."""
        rules, share = self.ledger.rules, self.ledger.spec.sample_256 / 256
        traffic = sum(payload_bytes("sparse2", rules.chunks, k) for k in (rules.k, rules.reduced_k))
        members = max((len(self.ledger.covered(claim)) for claim in claims), default=1)
        wanted = share * traffic / opening_max_bytes(rules, members)
        # The fraction is drawn too. Rounding would never audit a run whose share is below one opening a round.
        return min(MAX_OPENINGS, int(wanted) + (self.rng.random() < wanted % 1.0))

    async def _open(self, claim: Claim) -> None:
        # A reducer that does not answer is not proven wrong: it may be gone, or busy.
        covered, span = self.ledger.covered(claim), claim.body.span
        cap = opening_max_bytes(self.ledger.rules, len(covered))
        ask = OpeningAsk(claim.entry, self.rng.randrange(span.start, span.stop))
        try:
            async with asyncio.timeout(ANSWER_S):
                data = await self.net.ask_peer(claim.author, codec.encode(ask), cap)
            if data:
                await self._judge(claim, covered, codec.decode(data, Opening, max_bytes=cap), ask.chunk)
        except PeerFault as error:
            self.on_fault(claim.author, error)
        except (AtollError, TimeoutError) as error:
            log.debug("an opening of %s: %s", claim.author, error)

    async def _judge(self, claim: Claim, covered: tuple[Offer, ...], opening: Opening, chunk: int) -> None:
        """Publish the opening as the proof of a fault, if the worker finds that it proves one."""
        if opening.chunk != chunk:
            raise DecodeError("opening: of another chunk than was asked for")
        proof = codec.encode(self._proof(claim, covered, opening))
        path = self.spool / f"{claim.entry.hex()}-{chunk}.proof"
        # A file, because the worker judges it beside training, with the code that will check it on other nodes.
        write_whole(path, proof)
        try:
            if (await self.ask(JudgeRequest(str(path), claim.entry), JudgeReply)).wrong:
                blob = self.net.add_blob(path)
                self.publish(ReductionFault(claim.body.round, claim.entry, blob))
        finally:
            path.unlink(missing_ok=True)

    def _proof(self, claim: Claim, covered: tuple[Offer, ...], opening: Opening) -> FaultProof:
        # The proof holds every signed entry that it depends on, so that a node with another ledger can check it.
        entries, previous = self.ledger.entries, Digest(claim.body.previous)
        if previous and previous not in entries:
            raise DecodeError("opening: of a Reduction that continues an unknown one")
        return FaultProof(
            version=PROOF_VERSION,
            reduction=encode_entry(entries[claim.entry]),
            previous=encode_entry(entries[previous]) if previous else b"",
            contributions=tuple(encode_entry(entries[offer.entry]) for offer in covered),
            opening=opening,
        )

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
            else:
                self._false_reporters.add(author)
                self.on_fault(author, DecodeError("a proof of a fault that proves nothing"))
            return is_wrong
        return False

    async def _check_once(self, author: PeerId, fault: ReductionFault) -> bool:
        cap, was_held = proof_max_bytes(self.ledger.rules, MAX_SET), self.net.has_blob(fault.proof)
        if not was_held:
            async with asyncio.timeout(ANSWER_S):
                await self.net.fetch_blob(fault.proof, peers_to_ask(author, self.net), cap)
        is_wrong = False
        try:
            ask = JudgeRequest(str(self.net.blob_path(fault.proof)), fault.reduction)
            is_wrong = (await self.ask(ask, JudgeReply)).wrong
        finally:
            # A blob that was here before has another use. A valid proof stays: this node serves it to others.
            if not is_wrong and not was_held:
                self.net.delete_blob(fault.proof)
        return is_wrong
