"""How a node leaves its chain for another one, on a disk that may refuse: marked, written down, begun again."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from atoll.p2p.system.disk_reports import DISK_RETRY_S
from atoll.protocols.errors import LocalFault
from atoll.protocols.ids import Round
from atoll.protocols.ledger.records import Body, Entry, Follow


class DiskGuard(Protocol):
    """What is written through it, and whose refusals it reports."""

    def does(self, work: Callable[[], None]) -> bool:
        """Return whether the disk took what `work` writes."""

    def publish(self, body: Body) -> Entry | None:
        """Append to the own feed. Returns None if the disk refuses."""

    def on_disk_success(self) -> None:
        """Report that the disk works again, if it did not."""


class StateMark(Protocol):
    """Tells the next worker, durably, that its state is of a chain that this node leaves. None: no mark."""

    def put(self, first: int) -> int | None:
        """Mark it from this round on. Returns what a mark says that no worker has read.

        Raises DiskFault, CorruptFault. The bodies are those of a node whose state nobody keeps.
        """
        return None

    def put_back(self, before: int | None) -> None:
        """Let the mark say that again. Raises DiskFault."""
        return


class NoMark(StateMark):
    """No worker will read one."""


@dataclass(kw_only=True, slots=True)
class ChainExit:
    """The way out of one chain. It is gone once, and the next chain has its own."""

    guard: DiskGuard
    now: Callable[[], float]
    event: Callable[..., None]
    """Called with the round once the node has left."""
    mark: StateMark = field(default_factory=NoMark)
    begin_again: Callable[[Round], None] = lambda first: None
    """Begin again on the other chain, which decides the rounds from this one on."""
    has_left: bool = False
    _first: int = 0
    """The first round of the state that belongs to the chain which was left."""
    _refused_s: float = -math.inf
    _before: int | None = None

    def leave(self, first: Round, choice: Follow | None = None) -> bool:
        """Mark the state, append the choice that the feed lacks, and begin again. Returns whether it did that now.

        If the disk refuses one of the two, this node stays in its chain: one that began again would read no choice
        in its feed, and leave the same chain again, for ever. It may be asked at any event. Raises CorruptFault.
        """
        # Asked several times a tick and at each entry; after a heal thousands of entries come at once.
        if self.now() < self._refused_s + DISK_RETRY_S:
            return False
        if self.has_left:
            if choice is None and first < self._first:
                self._leave_from(first)
            return False
        # On disk before the ledger says that this node follows the other chain: a start after a kill would fold
        # rounds of that chain onto a state of this one. Again at each try: a worker that died since has obeyed it.
        if not (self._does_mark(first) and (choice is None or self._does_publish(choice))):
            self._refused_s = self.now()
            return False
        self.has_left, self._first = True, first
        self.guard.on_disk_success()
        self.event(round=first)
        self.begin_again(first)
        return True

    def _leave_from(self, first: Round) -> None:
        """Another chain won before this node began again, and it parts earlier: less of the state stays."""
        if self._does_mark(first):
            self._first = first
            self.event(round=first)
        else:
            self._refused_s = self.now()

    def leave_unmarked(self, first: Round | None, number: Round) -> bool:
        """Leave the chain of a state of round `number` that no mark names. Returns whether there is such a chain.

        `first`: the first round of an epoch, if there is one. Raises LocalFault if the disk refuses the mark: that
        is no state that went wrong, so it is kept, and the next start tries again.
        """
        if first is None or number < first:
            return False
        if not (self.has_left or self.leave(first)):
            raise LocalFault(
                "the disk refuses the mark by which this node leaves the chain of its saved state",
                hint="free space, or see `atoll logs`, and start again; the state stays as it is",
            )
        return True

    def _does_mark(self, first: Round) -> bool:
        def mark() -> None:
            self._before = self.mark.put(first)

        return self.guard.does(mark)

    def _does_publish(self, choice: Follow) -> bool:
        if self.guard.publish(choice) is not None:
            return True
        # A worker that starts meanwhile, perhaps where the others are away by then, would drop the only model.
        self.guard.does(partial(self.mark.put_back, self._before))
        return False
