"""Checking reducers: open a chunk of a Reduction now and then, tell of a wrong one, and check what others tell.

Nobody believes a fault without its proof, and a proof is checked with the RunSpec alone.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary

from atoll.node.daemon.coordinator.interfaces import Network, whom_to_ask
from atoll.node.daemon.reduction.effective_set import Effective
from atoll.node.daemon.reduction.ledger_view import ReducedSets
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
A = TypeVar("A")

ANSWER_S = 60.0
MOST_OPENINGS = 16
"""In one round, of one member."""
TRIES = 5
RETRY_S = 2.0


class Openings:
    """Samples, proofs, and which Reductions are known to be wrong."""

    def __init__(
        self,
        net: Network,
        sets: ReducedSets,
        spool: Path,
        ask: Callable[[JudgeRequest, type[JudgeReply]], Awaitable[JudgeReply]],
        publish: Callable[[Body], Entry | None],
        blame: Callable[[PeerId, AtollError], None],
        luck: random.Random,
    ) -> None:
        """`luck`: must be unknown to reducers before they publish."""
        self._net, self._sets, self._spool = net, sets, spool
        self._ask, self._publish, self._blame, self._luck = ask, publish, blame, luck
        self.wrong: frozenset[Digest] = frozenset()
        self._told: dict[tuple[PeerId, Digest], ReductionFault] = {}
        self._asked: dict[tuple[PeerId, Digest], int] = {}
        self._untrue: set[PeerId] = set()
        """Who told of a fault that is none."""
        self._turns: WeakValueDictionary[PeerId, asyncio.Lock] = WeakValueDictionary()

    def note(self, author: PeerId, fault: ReductionFault) -> bool:
        """Somebody tells of a fault; whether to check it: nobody is heard twice about one Reduction."""
        return self._told.setdefault((author, fault.reduction), fault) is fault

    def may_ask(self, peer: PeerId, claim: Claim) -> bool:
        """Whether a peer is given one more opening of our Reduction: each takes the worker's time."""
        asked = self._asked.get((peer, claim.entry), 0)
        self._asked[peer, claim.entry] = asked + 1
        return asked < MOST_OPENINGS

    def proofs(self, first: int = 0) -> set[Digest]:
        """Blobs that are said to prove faults of Reductions of this round or a later one."""
        return {fault.proof for fault in self._told.values() if fault.round >= first}

    def forget(self, before: int) -> None:
        """The payloads of rounds before this one are dropped."""
        self._told = {key: fault for key, fault in self._told.items() if fault.round >= before}
        self._asked = {key: asked for key, asked in self._asked.items() if key[1] in self._sets.claims}

    async def sample(self, parts: tuple[Effective, ...]) -> None:
        """Open some chunks of a round's Reductions, as many as the run's share of the traffic allows."""
        claims = [part.reduced for part in parts if part.reduced is not None]
        theirs = [claim for claim in claims if claim.author != self._sets.me]
        for _ in range(self._draws(claims) if theirs else 0):
            await self._open(self._luck.choice(theirs))

    def _draws(self, claims: list[Claim]) -> int:
        rules, share = self._sets.rules, self._sets.spec.sample_256 / 256
        traffic = sum(payload_bytes("sparse2", rules.chunks, k) for k in (rules.k, rules.reduced_k))
        members = max((len(self._sets.covered(claim)) for claim in claims), default=1)
        wanted = share * traffic / opening_max_bytes(rules, members)
        return min(MOST_OPENINGS, int(wanted) + (self._luck.random() < wanted % 1.0))

    async def _open(self, claim: Claim) -> None:
        """Open one chunk; whoever does not answer is not proven wrong."""
        covered, span = self._sets.covered(claim), claim.body.span
        cap = opening_max_bytes(self._sets.rules, len(covered))
        ask = OpeningAsk(claim.entry, self._luck.randrange(span.start, span.stop))
        try:
            async with asyncio.timeout(ANSWER_S):
                data = await self._net.ask_peer(claim.author, codec.encode(ask), cap)
            if data:
                await self._judge_answer(claim, covered, codec.decode(data, Opening, max_bytes=cap), ask.chunk)
        except PeerFault as error:
            self._blame(claim.author, error)
        except (AtollError, TimeoutError) as error:
            log.debug("an opening of %s: %s", claim.author, error)

    async def _judge_answer(self, claim: Claim, covered: tuple[Offer, ...], opening: Opening, chunk: int) -> None:
        if opening.chunk != chunk:
            raise DecodeError("opening: of another chunk than was asked for")
        proof = codec.encode(self._proof(claim, covered, opening))
        path = self._spool / f"{claim.entry.hex()}-{chunk}.proof"
        write_whole(path, proof)
        try:
            if (await self._ask(JudgeRequest(str(path), claim.entry), JudgeReply)).wrong:
                blob = self._net.add_blob(path)
                self._publish(ReductionFault(claim.body.round, claim.entry, blob))
        finally:
            path.unlink(missing_ok=True)

    def _proof(self, claim: Claim, covered: tuple[Offer, ...], opening: Opening) -> FaultProof:
        entries, previous = self._sets.entries, Digest(claim.body.previous)
        if previous and previous not in entries:
            raise DecodeError("opening: of a Reduction that continues an unknown one")
        return FaultProof(
            PROOF_VERSION,
            encode_entry(entries[claim.entry]),
            encode_entry(entries[previous]) if previous else b"",
            tuple(encode_entry(entries[offer.entry]) for offer in covered),
            opening,
        )

    async def hear(self, author: PeerId, fault: ReductionFault) -> bool:
        """Check what somebody tells; whether a Reduction is now known to be wrong that was not before.

        Checking means fetching: one proof of an author at a time, and none of who told one that proves nothing.
        """
        turn = self._turns.setdefault(author, asyncio.Lock())
        async with turn:
            return await self._checked(author, fault)

    async def _checked(self, author: PeerId, fault: ReductionFault) -> bool:
        if fault.reduction in self.wrong or author in self._untrue:
            return False
        for _ in range(TRIES):
            try:
                wrong = await self._check(author, fault)
            except PeerFault as error:
                self._untrue.add(author)
                self._blame(author, error)
                return False
            except (AtollError, TimeoutError) as error:
                log.debug("proof of a fault: %s", error)
                await asyncio.sleep(RETRY_S)
            else:
                if not wrong:
                    self._untrue.add(author)
                    self._blame(author, DecodeError("a proof of a fault that proves nothing"))
                self.wrong |= {fault.reduction} if wrong else set()
                return wrong
        return False

    async def _check(self, author: PeerId, fault: ReductionFault) -> bool:
        cap, is_here = proof_max_bytes(self._sets.rules, MAX_SET), self._net.has_blob(fault.proof)
        if not is_here:
            async with asyncio.timeout(ANSWER_S):
                await self._net.fetch_blob(fault.proof, whom_to_ask(author, self._net), cap)
        wrong = False
        try:
            ask = JudgeRequest(str(self._net.blob_path(fault.proof)), fault.reduction)
            wrong = (await self._ask(ask, JudgeReply)).wrong
        finally:
            if not wrong and not is_here:  # else it is something else's too
                self._net.delete_blob(fault.proof)
        return wrong
