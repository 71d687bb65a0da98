"""Audits reducers: opens random chunks of Reductions, publishes proofs of wrong ones, notes who does not answer.

How many chunks are opened follows from the size of the arena, and not from what openings cost: a reducer that lies
about one chunk of many is found as soon as one that lies about one of few.
"""

import asyncio
import itertools
import logging
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from atoll.node.daemon.core.interfaces import Network
from atoll.node.daemon.reduction.effective_set import EffectiveSlice
from atoll.node.daemon.reduction.ledger_view import ReductionLedger
from atoll.p2p.system.atomic_files import write_whole
from atoll.protocols import codec
from atoll.protocols.errors import AtollError, DecodeError, PeerFault
from atoll.protocols.ids import Digest, PeerId
from atoll.protocols.ledger.records import Body, Entry, ReductionFault, encode_entry
from atoll.protocols.ledger.reduction import (
    OPENED_CHUNKS,
    PROOF_VERSION,
    Claim,
    FaultProof,
    Offer,
    Opening,
    OpeningAsk,
    opening_max_bytes,
)
from atoll.protocols.local.worker_messages import JudgeReply, JudgeRequest

log = logging.getLogger(__name__)

AGAIN = 4
"""Patience with an opening that is asked for again, in that of the first time: a worker may just be starting."""
SPARE_OPENINGS = 16
"""Openings of one Reduction that a member may ask for beyond twice its share: complaints add some."""


class Outcome(Enum):
    """What asking for one opening showed."""

    ANSWERED = "answered"
    """An opening came, and is right."""
    WRONG = "wrong"
    """An opening came, and was published as a proof."""
    UNANSWERED = "unanswered"
    """The reducer was reached, and gave no legal opening within its patience."""
    UNREACHED = "unreached"
    """The reducer could not be reached: it may be gone."""
    UNKNOWN = "unknown"
    """This node could not judge: its own worker or disk failed, or what the Reduction covers is not known."""


def _groups(claim: Claim) -> int:
    return -(-claim.body.span.chunks // OPENED_CHUNKS)


_WITHOUT = (Outcome.UNANSWERED, Outcome.UNREACHED)


@dataclass(kw_only=True)
class ReducerAuditor:
    """Draws chunks of Reductions, asks their reducers to open them, and judges the openings."""

    net: Network
    ledger: ReductionLedger
    spool: Path
    ask: Callable[[JudgeRequest, type[JudgeReply]], Awaitable[JudgeReply]]
    publish: Callable[[Body], Entry | None]
    on_fault: Callable[[PeerId, AtollError], None]
    on_unanswered: Callable[[Claim, int, bool], None]
    """Called with a Reduction, the chunk that its reducer did not open, and whether it was reached."""
    patience_s: Callable[[], float]
    """Returns how long a reducer may take for one opening, in seconds."""
    rng: random.Random
    """Chooses what is opened: reducers must not know it before they publish."""
    _openings: Iterator[int] = field(default_factory=itertools.count)
    _openings_given: dict[tuple[PeerId, Digest], int] = field(default_factory=dict)

    def may_ask(self, peer: PeerId, claim: Claim) -> bool:
        """Return whether a peer gets one more opening of our Reduction: each takes the worker's time."""
        given = self._openings_given.get((peer, claim.entry), 0)
        self._openings_given[peer, claim.entry] = given + 1
        return given < self._most_openings(claim)

    def forget(self) -> None:
        """Forget the openings that were given of Reductions that the ledger view forgot."""
        given = self._openings_given.items()
        self._openings_given = {key: count for key, count in given if key[1] in self.ledger.claims}

    async def sample(self, parts: tuple[EffectiveSlice, ...]) -> None:
        """Open random chunks of a round's Reductions: this node's share of those that all members open."""
        claims = [part.reduced for part in parts if part.reduced is not None]
        theirs = [claim for claim in claims if claim.author != self.ledger.me]
        async with asyncio.TaskGroup() as group:
            for claim in theirs:
                group.create_task(self._open_some(claim, self._draw(claim)))

    def _share(self, claim: Claim) -> float:
        """Return how many groups of chunks of a Reduction one member opens on average.

        The auditors are the authors that decided who reduces, less the reducer itself.
        """
        auditors = max(1, len(self.ledger.plan(claim.body.round).authors) - 1)
        return _groups(claim) * self.ledger.spec.sample_256 / 256 / auditors

    def _most_openings(self, claim: Claim) -> int:
        return SPARE_OPENINGS + 2 * int(self._share(claim))

    def _draw(self, claim: Claim) -> list[int]:
        """Return the first chunk of each group that this node opens of a Reduction, in random order."""
        groups, share = _groups(claim), self._share(claim)
        # The fraction is drawn too. Rounding would never audit a small arena of many members.
        count = int(share) + (self.rng.random() < share % 1.0)
        drawn = self.rng.sample(range(groups), min(count, groups))
        return [claim.body.span.start + group * OPENED_CHUNKS for group in drawn]

    async def _open_some(self, claim: Claim, chunks: list[int]) -> None:
        for chunk in chunks:
            # One reducer is asked for one opening at a time, and for no other once it gave no answer.
            if await self.open(claim, chunk) in _WITHOUT:
                return

    async def opens_now(self, claim: Claim, chunk: int) -> bool:
        """Return whether a reducer opens what it did not before, and as much again as each member draws."""
        # Without the draw, who is silent at first would be asked for one chunk only.
        for one in (chunk, *self._draw(claim)):
            if await self.open(claim, one, AGAIN) != Outcome.ANSWERED:
                return False
        return True

    async def open(self, claim: Claim, chunk: int, patience: int = 1) -> Outcome:
        """Ask for one opening and judge it; a wrong one becomes a proof, none a complaint."""
        covered = self.ledger.covered(claim)
        if not covered:
            return Outcome.UNKNOWN
        cap, limit_s = opening_max_bytes(self.ledger.rules, len(covered)), patience * self.patience_s()
        found, opening = await self._ask_for(claim, chunk, cap=cap, limit_s=limit_s)
        if opening is not None:
            found = await self._judge(claim, covered, opening, chunk)
        if found in _WITHOUT:
            self.on_unanswered(claim, chunk, found == Outcome.UNANSWERED)
        return found

    async def _ask_for(
        self, claim: Claim, chunk: int, *, cap: int, limit_s: float
    ) -> tuple[Outcome, Opening | None]:
        try:
            async with asyncio.timeout(limit_s):
                ask = codec.encode(OpeningAsk(claim.entry, chunk))
                data = await self.net.ask_peer(claim.author, ask, cap)
            # An empty reply says that the reducer has no opening. It is as good as none.
            return Outcome.UNANSWERED, codec.decode(data, Opening, max_bytes=cap) if data else None
        except PeerFault as error:
            self.on_fault(claim.author, error)
            return Outcome.UNANSWERED, None
        except (AtollError, TimeoutError) as error:
            log.debug("an opening of %s: %s", claim.author, error)
            # One that keeps the connection and says nothing is not gone.
            is_here = claim.author in self.net.neighbours()
            return (Outcome.UNANSWERED if is_here else Outcome.UNREACHED), None

    async def _judge(self, claim: Claim, covered: tuple[Offer, ...], opening: Opening, chunk: int) -> Outcome:
        """Publish the opening as the proof of a fault, if the worker finds that it proves one."""
        # Our own question and a complaint may be about one chunk: each deletes its file when it is judged.
        path = self.spool / f"{claim.entry.hex()}-{chunk}-{next(self._openings)}.proof"
        try:
            if not opening.span.holds(chunk):
                raise DecodeError("opening: of other chunks than was asked for")
            proof = self._proof(claim, covered, opening)
            if proof is None:
                return Outcome.UNKNOWN
            # A file: the worker judges it beside training, with the code that will check it on other nodes.
            write_whole(path, codec.encode(proof))
            if (await self.ask(JudgeRequest(str(path), claim.entry), JudgeReply)).wrong:
                self.publish(ReductionFault(claim.body.round, claim.entry, self.net.add_blob(path)))
                return Outcome.WRONG
        except PeerFault as error:
            # Whatever is not under the signed roots is no opening.
            self.on_fault(claim.author, error)
            return Outcome.UNANSWERED
        except AtollError as error:
            log.debug("an opening of %s: %s", claim.author, error)
            return Outcome.UNKNOWN
        finally:
            path.unlink(missing_ok=True)
        return Outcome.ANSWERED

    def _proof(self, claim: Claim, covered: tuple[Offer, ...], opening: Opening) -> FaultProof | None:
        """The opening with every signed entry that it depends on; None if this node lacks one of them."""
        entries, previous = self.ledger.entries, Digest(claim.body.previous)
        needed = {claim.entry, *(offer.entry for offer in covered), *([previous] if previous else [])}
        if not needed <= entries.keys():
            return None
        return FaultProof(
            version=PROOF_VERSION,
            reduction=encode_entry(entries[claim.entry]),
            previous=encode_entry(entries[previous]) if previous else b"",
            contributions=tuple(encode_entry(entries[offer.entry]) for offer in covered),
            opening=opening,
        )
