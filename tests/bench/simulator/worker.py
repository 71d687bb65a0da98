"""The worker of one virtual node and the finalizer around it: trains, folds, checks, applies final rounds.

Its state is a hash chain over the final sets, so equal states mean equal sets. As in the product a node offers a
snapshot every few final rounds, drops the payloads that the older one covers, and adopts a snapshot of another
where payloads are gone.
"""

from functools import lru_cache, partial
from typing import TYPE_CHECKING

from atoll.node.daemon.consensus.types import CheckDone, FinalApplied, FinalizeRound
from atoll.node.daemon.coordinator.finalizer import PATIENCE_S, SNAPSHOT_EVERY
from atoll.node.daemon.rounds.types import (
    Behind,
    FoldDone,
    RoundFinal,
    TrainingDone,
    TrainingSaved,
    WorkerReady,
)
from atoll.protocols.ids import Digest, Round, digest
from atoll.protocols.ledger.records import Contribution
from atoll.protocols.local.worker_messages import Pending
from atoll_bench.simulator.history import Row

if TYPE_CHECKING:
    from atoll_bench.simulator.member import Member

WORK_S = 0.3
"""Seconds of a fold, a check or a save."""
LEAST = 0.25
"""The least share of a round's steps that a member takes, as in the presets."""
GENESIS = digest(b"genesis")


@lru_cache(maxsize=64)  # all nodes that fold a set onto one state ask for the same one
def state_after(before: Digest, names: tuple[Digest, ...]) -> Digest:
    """The state with one more final set."""
    return digest(before, *names)


class Worker:
    """State on disk: applied rounds, saved work, snapshots. The rest is forgotten by `begin`."""

    def __init__(self, member: "Member", train_s: float) -> None:
        self.member, self.train_s = member, train_s
        self.applied = -1
        self.state = GENESIS
        self.marked: int | None = None
        """First round of this state that belongs to a chain that the node left; None: it did not."""
        self.saved: dict[int, Pending] = {}
        self._announced = set[int]()
        """Rounds of the contributions in the own feed, of which so many entries were looked at."""
        self._looked_at = 0
        self.snapshots: list[tuple[int, Digest]] = []
        """The two newest ones: round and state."""

    def begin(self) -> None:
        """A new life of the node. A state of a chain that it left is put aside."""
        if self.marked is not None:
            self.member.rows.append(Row(self.member.clock.now, "other_chain", self.marked))
            self.applied, self.state, self.marked = -1, GENESIS, None
            self.saved, self.snapshots = {}, []
        self.is_ready = self._is_busy = self._is_told = self.has_trained = False
        self._finals: dict[int, FinalizeRound] = {}
        self._view: set[int] = set()
        self._stalled: tuple[int, Round] | None = None
        self._waiting = (-1, 0.0)
        rng = self.member.world.rng
        self.member.later(rng.uniform(1.0, 4.0), self._on_started)

    def _on_started(self) -> None:
        self.is_ready = True
        self.member.post_finality(FinalApplied(Round(self.applied)))

    # --- rounds -----------------------------------------------------------------------------------

    def train(self, number: Round, after: int, late_s: float) -> None:
        """The steps of a round; with one in flight some of them, and the rest after its fold.

        Steps of its first `late_s` seconds are left out, within the least share of the presets.
        """
        setting, member = self.member.world.setting, self.member
        member.world.on_round_started(number)
        pace = member.world.rng.uniform(0.95, 1.1) * member.world.links.slowness[member.number]
        total_s = max(LEAST, 1.0 - late_s / self.train_s) * self.train_s * min(4.0, pace)
        ahead_s = total_s * setting.ahead if after >= 0 else total_s
        member.later(ahead_s, partial(self._halt, number, after, total_s - ahead_s))

    def _halt(self, number: Round, after: int, rest_s: float) -> None:
        if after > self.applied and after not in self._view:
            self._stalled = after, number
            self._rest_s = rest_s
        else:
            self.member.later(rest_s, partial(self._trained, number))

    def _go_on(self) -> None:
        if self._stalled and (self._stalled[0] in self._view or self._stalled[0] <= self.applied):
            number, self._stalled = self._stalled[1], None
            self.member.later(self._rest_s, partial(self._trained, number))

    def _trained(self, number: Round) -> None:
        member = self.member
        self.has_trained = True
        payload = digest(b"payload", member.peer.encode(), number.to_bytes(4, "big"), bytes([member.life % 256]))
        pending = Pending(number, self.state, payload, "", 12, 1, 64, 1.0)
        member.post_round(TrainingDone(number, pending, self.train_s, member.now()))
        member.later(WORK_S, partial(self._saved, pending))

    def _saved(self, pending: Pending) -> None:
        self.saved[pending.round] = pending
        self.member.hold(pending.payload)
        self.member.post_round(TrainingSaved(pending, self.member.now()))

    def announce(self, pending: Pending) -> None:
        """Write the contribution, once."""
        member = self.member
        own = member.feeds.by_author.get(member.peer, [])[self._looked_at :]
        self._looked_at += len(own)
        self._announced |= {entry.body.round for entry in own if type(entry.body) is Contribution}
        if pending.round in self._announced:
            return
        p = pending
        member.world.name_payload(
            p.payload, member.write(Contribution(p.round, p.base, p.payload, p.steps, p.tokens, p.weight, p.loss))
        )
        member.hold(p.payload)

    def fold(self, number: Round, names: tuple[Digest, ...]) -> None:
        """Fold a closed round into the view."""
        self.member.later(WORK_S, partial(self._folded, number, digest(*names)))

    def _folded(self, number: Round, view: Digest) -> None:
        self._view.add(number)
        self._go_on()
        self.member.post_round(FoldDone(number, view, self.member.now()))

    def check(self, number: Round, names: tuple[Digest, ...]) -> None:
        """The state that a set would give."""
        self.member.later(WORK_S, partial(self._checked, number, names))

    def _checked(self, number: Round, names: tuple[Digest, ...]) -> None:
        if self.applied == number - 1:
            self.member.post_finality(CheckDone(number, names, state_after(self.state, names)))

    def is_stranded(self) -> bool:
        """Whether nobody that runs has what the next final round needs: neither payloads nor a snapshot."""
        world, action = self.member.world, self._finals.get(self.applied + 1)
        if action is None:
            return False
        running = [member for member in world.members if member.is_up]
        if any(number in self._finals for member in running for number, _ in member.worker.snapshots):
            return False
        payloads = [self.member.known[name][1].payload for name in action.contributions]
        return not all(any(payload in member.payloads for member in running) for payload in payloads)

    # --- final rounds -----------------------------------------------------------------------------

    def add_final(self, action: FinalizeRound) -> None:
        """A round became final; after a restart all come again."""
        if action.round > self.applied:
            self._finals[action.round] = action
            return
        if action.round == self.applied and action.state != self.state:
            member = self.member
            member.rows.append(Row(member.clock.now, "diverged", action.round, names=action.contributions))
        self._report(action.round)

    def step(self) -> None:
        """Start whatever can be done next."""
        if self._is_told and not self._finals:
            return  # nearly always, and this is asked after every event
        member = self.member
        if self._is_busy or not self.is_ready or not member.is_synced:
            return
        action = self._finals.get(self.applied + 1)
        if action is None:
            self._tell_ready()
            return
        payloads = [member.known[name][1].payload for name in action.contributions]
        if all(payload in member.payloads for payload in payloads):
            self._is_busy = True
            member.later(WORK_S, partial(self._apply, action))
        elif not self._adopt_soon():
            member.fetch(action.contributions)

    def _tell_ready(self) -> None:
        if not self._is_told:
            self._is_told = True
            self.member.post_round(WorkerReady(self.applied, tuple(self.saved.values()), self.member.now()))

    def _apply(self, action: FinalizeRound) -> None:
        member = self.member
        self._is_busy = False
        state = state_after(self.state, action.contributions)
        if state != action.state:
            member.rows.append(Row(member.clock.now, "diverged", action.round, names=action.contributions))
        self._finals.pop(action.round)
        self._advance(action, state)
        if (self.applied + 1) % SNAPSHOT_EVERY == 0:
            self._snapshot()

    def _advance(self, action: FinalizeRound, state: Digest) -> None:
        member = self.member
        self.applied, self.state = action.round, state
        epoch = next(part.epoch for part in reversed(member.finality.chain) if part.first <= action.round)
        voted_out = member.finality.epochs.voted_out.items()
        row = Row(
            at=member.clock.now,
            kind="final",
            round=action.round,
            epoch=epoch,
            names=action.contributions,
            state=state,
            voters=member.finality.decided[action.round][0],
            authors=frozenset(member.known[name][0] for name in action.contributions),
            excluded=tuple(sorted(peer for peer, first in voted_out if first == action.round + 1)),
        )
        member.rows.append(row)
        member.world.trace("final", member.number, action.round, state)
        self.saved = {at: pending for at, pending in self.saved.items() if at > action.round}
        self._go_on()
        self._report(action.round)

    def _report(self, number: Round) -> None:
        self.member.post_round(RoundFinal(number, self.member.now()))
        self.member.post_finality(FinalApplied(number))

    def _snapshot(self) -> None:
        self.snapshots = [*self.snapshots[-1:], (self.applied, self.state)]
        oldest = self.snapshots[0][0]
        if len(self.snapshots) > 1:
            self.member.world.drop_payloads(self.member, oldest)

    def _adopt_soon(self) -> bool:
        """Begin to fetch a snapshot where payloads are gone, or were waited for in vain."""
        member, now = self.member, self.member.clock.now
        if self._waiting[0] != self.applied + 1:
            self._waiting = (self.applied + 1, now)
        offers = [
            (number, other.number, state)
            for other in member.world.reachable(member)
            for number, state in other.worker.snapshots
            if number in self._finals and other.worker.marked is None
        ]
        if not offers:
            return False
        number, holder, state = max(offers)
        if self.applied + 1 >= number - SNAPSHOT_EVERY and now - self._waiting[1] < PATIENCE_S:
            return False
        self._is_busy, self._is_told = True, False
        member.post_round(Behind(f"fetching the model of round {number}", member.now()))
        seconds = 2.0 + member.world.transfer_s(member, member.world.members[holder])
        member.later(seconds, partial(self._adopt, number, holder, state))
        return True

    def _adopt(self, number: int, holder: int, state: Digest) -> None:
        member = self.member
        self._is_busy = False
        action = self._finals.get(number)
        if (
            action is None
            or action.state != state
            or not member.world.is_reachable(member, member.world.members[holder])
        ):
            return
        for at in sorted(at for at in self._finals if at <= number):
            self._advance(self._finals[at], self._finals.pop(at).state)
        self.snapshots = [*self.snapshots[-1:], (number, state)]
