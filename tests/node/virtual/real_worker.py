"""A worker on virtual time that is one: the session with its model, codec, fold and disk; only steps wait."""

import asyncio
import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from atoll.node.ipc.chain_mark import ChainMark
from atoll.node.ipc.time_budget import TimeBudget
from atoll.node.ipc.worker_process import WorkerDied
from atoll.node.worker.session import Session
from atoll.protocols import codec
from atoll.protocols.errors import Superseded
from atoll.protocols.ids import Digest, PeerId
from atoll.protocols.local.worker_messages import (
    AdoptReply,
    AdoptRequest,
    Answer,
    Ask,
    FinalizeReply,
    FinalizeRequest,
    FoldReply,
    FoldRequest,
    SaveReply,
    SaveRequest,
    StartReply,
    StartRequest,
    TrainReply,
    TrainRequest,
)
from atoll.protocols.run.run_spec import RunSpec

Sets = dict[int, frozenset[bytes]]


class Seen(NamedTuple):
    """What all workers of a world saw."""

    final_sets: dict[int, frozenset[bytes]]
    views: dict[tuple[tuple[int, frozenset[bytes]], ...], Digest]
    """View by all sets that are in it."""
    finals: dict[tuple[tuple[int, frozenset[bytes]], ...], set[int]]
    """How far finality was where a view was seen."""
    gone: dict[int, frozenset[bytes]]
    """What a final round took out of the rounds before, by that round."""

    def sets_at(self, final: int) -> Sets:
        """What counts in each final round once `final` is the newest."""
        gone = frozenset[bytes]().union(*(names for at, names in self.gone.items() if at <= final))
        return {at: names - gone for at, names in self.final_sets.items() if at <= final}


class RealWorker:
    """Asserts, whenever a set changes, that the view is the one that any worker had with the same sets."""

    def __init__(self, folder: Path, me: PeerId, train_s: float, spec: RunSpec, seen: Seen) -> None:
        self._start = StartRequest(codec.encode(spec), me, str(folder.parent), "", 1, "cpu")
        self._home = folder.parent
        self._step_s = train_s / spec.steps(0)
        self._seen, self._sets = seen, Sets()
        self._moved = asyncio.Event()
        self._saved = threading.Event()
        self._trains = 0
        self.lives = self.start_moves = 0
        self.owned: dict[int, bytes] = {}
        """Bitmap of the experts that were trained, by round."""
        self.trained: list[int] = []
        self.session: Session | None = None
        self.final, self.state = -1, Digest(b"")

    async def start(self) -> StartReply:
        """Its answer to Start."""
        return self.started()

    def started(self) -> StartReply:
        """A new process: whatever was in memory is gone."""
        self.lives += 1
        if self.session is not None:
            self.session._async_save.wait()  # its thread dies with a process
        self.session = Session(self._start, saves=TimeBudget(math.inf), saved=self._saved.set)
        found = self.session.started()
        self.final, self.state = found.final, found.state
        self._sets = self._seen.sets_at(found.final)
        return found

    def leave_chain(self, first: int) -> None:
        """The daemon marks the state as one of a chain that it left, and ends."""
        if self.session is not None:
            self.session.close()
        ChainMark(self._home).put(first)
        self.lives += 1

    def wake(self) -> None:
        """Whoever waits for a fold looks again."""
        self._moved.set()

    async def ask(self, ask: Ask, kind: type[Any]) -> Any:
        life, answer = self.lives, None
        await asyncio.sleep(0.01)
        self._check(life, None)
        answer = await self._train(ask) if isinstance(ask, TrainRequest) else self._answer(ask)
        self._check(life, None)
        assert isinstance(answer, kind), answer
        return answer

    def _answer(self, ask: Ask) -> Answer:
        assert self.session is not None
        answer = self._keep(ask) if isinstance(ask, SaveRequest) else self.session.answer(ask)
        match ask, answer:
            case FoldRequest(number, members), FoldReply(_, view):
                if number > self.final:
                    self._sets[number] = frozenset(one.entry for one in members)
                    self._look(view)
            case FinalizeRequest(number, members), FinalizeReply(_, state):
                names = frozenset(one.entry for one in members)
                assert self._seen.final_sets.setdefault(number, names) == names
                gone = frozenset(name for one in ask.excised for name in one.gone)
                assert self._seen.gone.setdefault(number, gone) == gone
                self._sets |= self._seen.sets_at(number)
                self.final, self.state = number, state
                self._look(self.session._fold.view_digest())
            case AdoptRequest(number), AdoptReply(_, state):
                self._sets = self._seen.sets_at(number)
                self.final, self.state = number, state
                self._look(state)
        self.wake()
        return answer

    def _keep(self, ask: SaveRequest) -> SaveReply:
        """Wait for the disk in real time: it takes no virtual time."""
        assert self.session is not None
        while (kept := self.session.finish_save(ask)) is None:
            self._saved.wait()
            self._saved.clear()
        return kept

    def _look(self, view: Digest) -> None:
        key = tuple(sorted((at, names) for at, names in self._sets.items() if names))
        assert self._seen.views.setdefault(key, view) == view, "equal sets, another view"
        self._seen.finals.setdefault(key, set()).add(self.final)

    async def _train(self, ask: TrainRequest) -> TrainReply:
        assert self.session is not None
        self._trains += 1
        self.wake()
        now = (self.lives, self._trains)
        steps = self.session.train(ask)
        try:
            for event in steps:
                if isinstance(event, TrainReply):
                    self.trained.append(ask.round)
                    self.owned[ask.round] = event.pending.experts
                    return event
                if event is None:
                    self._moved.clear()
                    await self._moved.wait()
                else:
                    await asyncio.sleep(self._step_s)
                self._check(*now)
        finally:
            steps.close()
        raise AssertionError("a round ends with its result")

    def _check(self, life: int, train: int | None) -> None:
        if life != self.lives:
            raise WorkerDied("the worker process ended")
        if train is not None and train != self._trains:
            raise Superseded("another round took the place of this one")


def both_before_and_after(finals: Mapping[Any, set[int]]) -> int:
    """Views that were seen where finality was not equally far."""
    return sum(len(found) > 1 for found in finals.values())
