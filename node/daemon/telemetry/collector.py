"""Samples the round's state: what the node waits for while it is idle, and which members came and went.

An idle worker waits for bytes on their way (`transfer`), or for something else (`wait`). The worker cannot know
which, so the daemon samples the round's state every SAMPLE_S and splits idle time by what it saw.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from atoll.node.daemon.rounds.participants import MemberView
from atoll.node.daemon.rounds.state import RESTING, Phase, RoundState
from atoll.node.daemon.telemetry.durations import NodeDurations
from atoll.node.daemon.telemetry.goodput import GoodputAccount, IdleReason
from atoll.node.daemon.telemetry.round_log import RoundLog
from atoll.protocols.ids import PeerId
from atoll.protocols.local.control_messages import Goodput
from atoll.protocols.local.time_spent import TimeSpent

SAMPLE_S = 0.25
REST_S = 1.0
"""The same in phases in which nothing is awaited of a transfer."""
MEMBERS_S = 10.0
"""Least time between two events of members that came or went, and NAMED the most names in one: leases of many
identities must not fill the journal."""
NAMED = 8
_TRANSFER_PHASES = (Phase.CATCH_UP, Phase.TRAIN, Phase.COLLECT)
"""Phases that payloads can hold up. In a pause, or while members gather, nothing waits for a transfer."""


@dataclass
class GoodputCollector:
    """Connects the worker's supervisor, the round machine and the round log to the node's time account."""

    log: RoundLog
    now: Callable[[], float]
    """A clock in seconds."""
    state: Callable[[], RoundState]
    payload_bytes_up: Callable[[], int]
    """Counts payload bytes sent to others since the start."""

    def __post_init__(self) -> None:
        self._account = GoodputAccount(self.now(), self.log.add_time)
        self._upload = UploadState()
        self._members = MemberWatch(self.log)
        self.durations = NodeDurations(self.now)
        """How long steps, rounds and answers of peers took."""

    async def serve(self) -> None:
        """Sample until cancelled."""
        while True:
            self.sample()
            self._members.see(self.state().members, self.now())
            await asyncio.sleep(REST_S if self.state().phase in RESTING else SAMPLE_S)

    def sample(self) -> None:
        """Record what an idle worker waits for now."""
        unsent = self._upload.is_unsent(self.log.newest_payload, self.payload_bytes_up())
        self._account.set_idle_reason(idle_reason(self.state(), unsent=unsent), self.now())

    def on_spent(self, spent: TimeSpent) -> None:
        """Record the time account that came with a reply of the worker."""
        self.sample()
        self._account.add_reading(spent, self.now())
        self.durations.on_spent(spent)

    def on_worker_gone(self) -> None:
        """Record that the worker ended."""
        self._account.end_worker(self.now())

    def report(self) -> Goodput:
        """Where the time went, for the status."""
        return self._account.report(self.now())


@dataclass(slots=True)
class MemberWatch:
    """Journals `joined` and `left`: whose lease is live here and was not, or was and is not.

    Members that have shown no work yet are left out: a node waits for some of them in turn.
    """

    log: RoundLog
    _here: frozenset[PeerId] = frozenset()
    _told_at: float = float("-inf")

    def see(self, members: Mapping[PeerId, MemberView], now: float) -> None:
        """Compare these members with those of the newest events, at most once in MEMBERS_S."""
        if now - self._told_at < MEMBERS_S:
            return
        here = frozenset(peer for peer, view in members.items() if not view.untried)
        if here == self._here:
            return
        for name, peers in (("joined", here - self._here), ("left", self._here - here)):
            if peers:
                self.log.event(name, peers=sorted(peers)[:NAMED], count=len(peers))
        self._here, self._told_at = here, now


@dataclass(slots=True)
class UploadState:
    """Tells whether our newest payload can have reached anybody, by the payload bytes that were sent."""

    _round: int = -1
    _before_bytes: int = 0
    _seen_bytes: int = 0

    def is_unsent(self, newest: tuple[int, int] | None, up_bytes: int) -> bool:
        """`newest` is the round and size of our newest payload, `up_bytes` counts all payload bytes sent so far.

        Call it often: bytes sent between two calls count for a payload that is new at the second one.
        """
        number, size = newest or (self._round, 0)
        if number != self._round:
            self._round = number
            self._before_bytes = self._seen_bytes
        self._seen_bytes = up_bytes
        return up_bytes - self._before_bytes < size


def idle_reason(state: RoundState, *, unsent: bool) -> IdleReason | None:
    """What an idle worker waits for; None while it folds and is not idle.

    `unsent` says that nobody can have our newest payload yet.
    """
    if state.phase is Phase.FOLD:
        return None
    if state.phase not in _TRANSFER_PHASES:
        return "wait"
    upload = unsent and bool(state.members) and state.phase is not Phase.CATCH_UP
    return "transfer" if upload or _is_fetching(state) else "wait"


def _is_fetching(state: RoundState) -> bool:
    """Whether a payload is announced and not held. Rounds that are closed here matter only in catching up."""
    every = state.phase is Phase.CATCH_UP
    return any(book.missing for number, book in state.books.items() if every or number > state.closed)
