"""Pulls from neighbours within a round, and answers to those that pull from here. Wire: docs/wires/pull.md.

Training never waits: a pull goes on beside the steps, one at a time, and what comes too late is dropped. Only the
neighbour of a tick is asked or answered, once, so nobody can ask for more than the draw gives.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from atoll.node.daemon.telemetry.round_log import RoundLog
from atoll.p2p.system.atomic_files import disk, make_folder
from atoll.protocols import codec
from atoll.protocols.errors import AtollError, DecodeError, LocalFault, PeerFault
from atoll.protocols.ids import PeerId, Round
from atoll.protocols.ledger.coverage import payload_size
from atoll.protocols.local.worker_messages import Ask, TrainProgress
from atoll.protocols.pulls.draw import neighbour_of, pairs
from atoll.protocols.pulls.question import QUESTION_MAX_BYTES, PullQuestion
from atoll.protocols.pulls.requests import DifferenceReply, DifferenceRequest, MixReply, MixRequest
from atoll.protocols.run.run_spec import RunSpec
from atoll.protocols.run.sections.variants.gossip import GossipSpec

A = TypeVar("A")
PULL_S = 10.0
"""Deadline of a pull, beside the time that its payload takes on the slowest link that is waited for."""
NO_ROUND = Round(-1)
SLOWEST_BYTES_S = 125_000
"""One megabit a second."""


class PullWire(Protocol):
    """How questions reach neighbours; `SwarmPulls` implements it."""

    async def ask(self, peer: PeerId, question: bytes, max_bytes: int) -> bytes:
        """Return the answer; empty if there is none. Raises Unreachable, DecodeError."""

    def blame(self, peer: PeerId, error: PeerFault) -> None:
        """Count a protocol fault of a peer."""


class PullWorker(Protocol):
    """`WorkerClient` implements it."""

    async def ask(self, ask: Ask, kind: type[A]) -> A:
        """Return the worker's reply. Raises WorkerDied, or the fault that the worker named."""


@dataclass(kw_only=True, slots=True)
class NeighbourPulls:
    """One member's pulls. Knows the round that its worker trains, or trained last."""

    spec: RunSpec
    gossip: GossipSpec
    me: PeerId
    log: RoundLog
    neighbours: PullWire
    worker: PullWorker
    voters: Callable[[], Collection[PeerId]]
    """Returns the members that decide rounds now: among them neighbours are drawn."""
    is_excluded: Callable[[PeerId, Round], bool]
    start_task: Callable[[Coroutine[Any, Any, None], str], None]
    folder: Path
    """For payloads on their way to and from the worker."""
    _round: Round = NO_ROUND
    _members: tuple[PeerId, ...] = ()
    """Among whom neighbours are drawn in this round."""
    _tick: int = 0
    """The newest tick that this member reached."""
    _given: set[int] = field(default_factory=set)
    """Ticks of this round for which the neighbour was answered."""
    _asked: int = 0
    _pulled: int = 0
    _is_pulling: bool = False
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One difference at a time is on its way from the worker, so memory holds one payload."""

    def __post_init__(self) -> None:
        make_folder(self.folder)

    def on_progress(self, progress: TrainProgress) -> None:
        """An inner step was made: begin a pull if a tick has come that has a neighbour."""
        if progress.round != self._round:
            self._begin(progress.round)
        tick = progress.step // self.gossip.steps
        if tick <= self._tick or progress.step >= progress.steps:  # after the last step the fold merges
            return
        self._tick = tick
        peer = self._neighbour(self.me, tick)
        # A slow neighbour costs the ticks that come while it is waited for, and nothing else.
        if peer is not None and not self._is_pulling and not self.is_excluded(peer, self._round):
            self._is_pulling = True
            self._asked += 1
            self.start_task(self._pull(self._round, tick, peer), "pull")

    async def answer(self, peer: PeerId, question: bytes) -> bytes:
        """Return what was trained in the round at hand so far; empty for who has no right to it now.

        Raises DecodeError for what is no question.
        """
        asked = codec.decode(question, PullQuestion, max_bytes=QUESTION_MAX_BYTES)
        if not self._may_pull(peer, asked):
            return b""
        self._given.add(asked.tick)
        path = self.folder / "given"
        try:
            async with self._turn:
                ask = DifferenceRequest(Round(asked.round), str(path))
                if not (await self.worker.ask(ask, DifferenceReply)).is_written:
                    return b""
                with disk(path):
                    return await asyncio.to_thread(path.read_bytes)
        except LocalFault:
            return b""  # the worker died, or the disk refused: the neighbour's tick is lost, and nothing else

    def _begin(self, number: Round) -> None:
        if self._round != NO_ROUND:
            self.log.event(
                "pulls", round=self._round, asked=self._asked, pulled=self._pulled, given=len(self._given)
            )
        self._round, self._members, self._tick = number, tuple(self.voters()), 0
        self._asked = self._pulled = 0
        self._given = set()

    def _neighbour(self, peer: PeerId, tick: int) -> PeerId | None:
        ticks = self.gossip.ticks(self.spec.steps(self._round))
        drawn = pairs(self.gossip, self.spec.id, self._round, tick, ticks=ticks, members=self._members)
        return neighbour_of(peer, drawn)

    def _may_pull(self, peer: PeerId, asked: PullQuestion) -> bool:
        """Whether `peer` is our neighbour at that tick, was not answered, and the round is the one at hand."""
        if asked.round != self._round or asked.tick in self._given or self.is_excluded(peer, self._round):
            return False
        most = self.gossip.ticks(self.spec.steps(self._round) * self.spec.pace.most_256 // 256)
        return asked.tick <= most and self._neighbour(peer, asked.tick) == self.me

    async def _pull(self, number: Round, tick: int, peer: PeerId) -> None:
        size = payload_size(self.spec, number)
        path = self.folder / "pulled"
        try:
            async with asyncio.timeout(PULL_S + size / SLOWEST_BYTES_S):
                question = codec.encode(PullQuestion(number, tick))
                payload = await self.neighbours.ask(peer, question, size)
            if not payload:
                return
            if len(payload) != size:
                raise DecodeError(f"a difference of {len(payload)} bytes instead of {size}")
            with disk(path):  # without fsync: what a crash loses is one tick
                await asyncio.to_thread(path.write_bytes, payload)
            # Without a deadline: the worker maps the file, so it must not be written again before the answer.
            mixed = await self.worker.ask(MixRequest(number, str(path)), MixReply)
        except PeerFault as error:
            self.neighbours.blame(peer, error)
        except (AtollError, TimeoutError):
            return  # the neighbour is gone or slow, our disk is full, the worker died: this tick has no pull
        else:
            self._pulled += mixed.is_mixed and number == self._round
        finally:
            self._is_pulling = False
