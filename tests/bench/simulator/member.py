"""One virtual node: the round machine and the finality machine of the product, with models of what is around them.

As in the driver, everything that happens becomes an event of the two machines, and their actions are performed at
once. Events that come in one instant are one step. A crash forgets the machines; ledger, payloads, saved work and
the state of the newest final round stay.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, get_args

from msgspec.structs import replace

from atoll.node.daemon.certificates.chosen_path import chosen_path
from atoll.node.daemon.consensus import machine as finality_machine
from atoll.node.daemon.consensus import types as finality_types
from atoll.node.daemon.consensus.proposer import patience_of
from atoll.node.daemon.rounds import machine as round_machine
from atoll.node.daemon.rounds import types as round_types
from atoll.protocols.ids import Digest, PeerId
from atoll.protocols.ledger.records import (
    Ack,
    BallotBody,
    Body,
    Contribution,
    Exclude,
    Follow,
    Leave,
    Promise,
    Vote,
)
from atoll_bench.simulator.feeds import FeedEntry, Feeds, entry_after
from atoll_bench.simulator.history import History, Row
from atoll_bench.simulator.leases import Leases
from atoll_bench.simulator.removals import Removals
from atoll_bench.simulator.worker import Worker

if TYPE_CHECKING:
    from atoll_bench.simulator.world import World

TICK_S = 5.0
EXCHANGE_EVERY_S = 10.0
ALONE_S = 8.0
"""As of the daemon: who worked before and finds nobody goes on after so long."""
SLOT_S = 1.0
"""What arrives within so long is read together."""
RETRY_S = 5.0
_BALLOTS = frozenset(get_args(BallotBody))
_OTHERS = frozenset([Ack, Vote, Promise])
_STILL = frozenset([Ack, Follow, Exclude])


class Member:
    """A node that keeps to the protocol."""

    is_liar = False

    def __init__(self, world: "World", number: int, peer: PeerId, train_s: float) -> None:
        """`train_s`: virtual seconds of a round's steps."""
        self.world, self.number, self.peer = world, number, peer
        self.clock = world.clock
        self.feeds = Feeds()
        self.known: dict[Digest, tuple[PeerId, Contribution]] = {}
        """Contributions of the ledger."""
        self.payloads: set[Digest] = set()
        self.rows: list[Row] = []
        self.worker = Worker(self, train_s)
        self.leases = Leases(self)
        self.removals = Removals(self)
        self.is_up = self.is_gone = False
        """`is_gone`: it never comes back."""
        self.life = 0
        self._came_up = self._went_down = -math.inf
        self._down_s = math.inf
        """For how long it was down before it came up."""
        self.frozen: list[Callable[[], None]] | None = None
        """What waits until the machine runs again; None: it runs."""
        self._rate = world.rng.uniform(0.98, 1.02)
        """Pace of its clock, which begins anywhere."""
        self._zero = 0.0

    # --- life -------------------------------------------------------------------------------------

    def boot(self) -> None:
        """Start: replay the ledger, find somebody to compare it with, go on."""
        if self.is_up or self.is_gone:
            return
        self.is_up, self.life, self.frozen = True, self.life + 1, None
        if self.clock.now - self._went_down > 2.0:  # not where only its chain changes
            self._came_up, self._down_s = self.clock.now, self.clock.now - self._went_down
        self.world.trace("boot", self.number)
        self.world.topology += 1
        self._zero = self.clock.now - self.world.rng.uniform(0.0, 1e6)
        self._boxes: dict[int, list[FeedEntry | Digest]] = {}
        self._round_events: list[round_types.Event] = []
        self._finality_events: list[finality_types.Event] = []
        self._fetching: set[Digest] = set()
        self._wanted: dict[int, finality_types.FetchOrphans] = {}
        self.is_synced = False
        setting = self.world.setting
        self.round = round_machine.begin(setting.round_config(self.peer))
        orphans = ((entry.author, entry.body) for entry in self.feeds.orphans.values())
        chosen = chosen_path(((entry.author, entry.body) for entry in self.feeds.arrivals), self.peer, orphans)
        self.finality = finality_machine.begin(
            setting.run, self.peer, setting.rounds, self.world.owner, lease_s=setting.lease_s, chosen=chosen
        )
        self.leases.begin()
        self.removals.begin()
        self.worker.begin()
        self.finality = replace(self.finality, now=self.now())
        for entry in self.feeds.arrivals:
            self._feed_to_finality(entry)
            if self._may_move(entry.body):
                self._drain()
        for entry in self.feeds.orphans.values():
            self._feed_to_finality(entry, is_orphan=True)
        self._drain()
        self.removals.step()  # before a set is made of excluded work
        for entry in self.feeds.arrivals:
            self._feed_to_round(entry)
        self._drain()
        self.later(self.world.rng.uniform(0.1, TICK_S), self._tick)
        self.later(self.world.rng.uniform(0.5, 2.0), partial(self._sync, self.clock.now))

    def _may_move(self, body: Body) -> bool:
        """Whether a replayed entry may move anything: what moves nothing is handled with the next one that may."""
        # Before the replay is over an Ack, a Follow and a vote against a member move nothing, a ballot only the
        # round that is decided, a contribution only a set that waits for it.
        if type(body) in _BALLOTS:
            return body.round == self.finality.deciding
        kind = type(body)
        return kind not in _STILL and (kind is not Contribution or bool(self.finality.missing))

    def crash(self) -> None:
        """End at once, as by SIGKILL."""
        self.is_up, self.life, self._went_down = False, self.life + 1, self.clock.now
        self.world.trace("crash", self.number)
        self.world.topology += 1

    def leave(self) -> None:
        """Stop in good order: a Leave, brought to one neighbour."""
        own = [
            entry.body.round
            for entry in self.feeds.by_author.get(self.peer, ())
            if isinstance(entry.body, Contribution)
        ]
        others = self.world.reachable(self)
        if own and self.leases.live and self.frozen is None and self.is_synced:
            self.write(Leave(max(own)))
            for other in others[:1]:
                other.pull(self)
        self.crash()

    def freeze(self) -> None:
        """Stop the process without ending it, as a suspended machine does."""
        if self.frozen is None:
            self.frozen = []

    def thaw(self) -> None:
        """Let it run again: all that waited happens now."""
        waiting, self.frozen = self.frozen or [], None
        for call in waiting:
            call()

    def now(self) -> float:
        """Its own monotonic clock."""
        return (self.clock.now - self._zero) * self._rate

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call in this life only, then handle what follows from it."""
        self.clock.after(seconds, partial(self._call, self.life, call))

    def _call(self, life: int, call: Callable[[], None]) -> None:
        if not self.is_up or self.life != life:
            return
        if self.frozen is not None:
            self.frozen.append(partial(self._call, life, call))
            return
        call()
        # Checked here too: after most calls there is nothing, and this runs a hundred thousand times a run.
        if self._finality_events or self._round_events:
            self._drain()
        if self.is_up and self.life == life:
            self.worker.step()
            if self._finality_events or self._round_events:
                self._drain()

    def _sync(self, began: float) -> None:
        """Compare ledgers with somebody before any vote; a node that worked before goes on alone after a while."""
        others = self.world.reachable(self)
        worked = self.feeds.next(self.peer) > 0
        if others:
            self.pull(self.world.rng.choice(others))
        elif not (self.world.expects_nobody(self) or (worked and self.clock.now - began >= ALONE_S)):
            self.later(1.0, partial(self._sync, began))
            return
        self.is_synced = True
        is_fresh = self.clock.now - self._came_up < 2 * self.world.setting.lease_s
        newest = max((made.round for author, made in self.known.values() if author == self.peer), default=-1)
        self.post_finality(finality_types.ReplayDone(self._down_s if is_fresh else 0.0, newest))
        self.later(self.world.rng.uniform(0.0, EXCHANGE_EVERY_S), self._exchange)

    def _exchange(self) -> None:
        others = self.world.reachable(self)
        if others:
            self.pull(self.world.rng.choice(others))
        self.later(EXCHANGE_EVERY_S * self.world.rng.uniform(0.5, 1.5), self._exchange)

    def _tick(self) -> None:
        now = self.now()
        self.leases.refresh()
        self.post_round(round_types.RoundTick(now))
        patience_s = patience_of(self.round.train_s, self.world.setting.lease_s)
        if patience_s != self.finality.patience_s:
            self.finality = replace(self.finality, patience_s=patience_s)
        if (self.leases.live, self.leases.lost) != (self.finality.members, self.finality.lost):
            self.post_finality(finality_types.MembersSeen(self.leases.live, self.leases.lost))
        if self.feeds.forked != self.finality.equivocators:
            self.post_finality(finality_types.EquivocatorsSeen(frozenset(self.feeds.forked)))
        self.post_finality(finality_types.FinalityTick(now))
        self.removals.step()
        self._ask_for_orphans()
        self.later(TICK_S, self._tick)

    def _ask_for_orphans(self) -> None:
        others = self.world.reachable(self) if self._wanted else []
        for wanted in [*self._wanted.values()] if others else []:
            found = self.world.rng.choice(others).feeds.find(wanted.entries, wanted.proposals)
            for entry in found:
                self._read(entry)  # it may be the first proof of a fork
            for entry in self.feeds.keep_orphans(found):
                self._feed_to_finality(entry, is_orphan=True)

    # --- ledger and payloads ----------------------------------------------------------------------

    def write(self, body: Body) -> FeedEntry:
        """Append to the own feed and push it to everybody that is reached."""
        entry = entry_after(self.peer, self.feeds.last(self.peer), body)
        self.world.trace("write", self.number, entry.name)
        self._read(entry)
        self.world.push(self, entry)
        return entry

    def pull(self, other: "Member") -> None:
        """Take all that another one has and this one lacks, leases too."""
        for entry in self.feeds.lacks(other.feeds):
            self._read(entry)
        self.leases.merge(other.leases)

    def arrive(self, at: float, item: FeedEntry | Digest) -> None:
        """An entry, or a payload, gets here at this time."""
        slot = int(at / SLOT_S) + 1
        box = self._boxes.get(slot)
        if box is None:
            self._boxes[slot] = box = []
            self.later(slot * SLOT_S - self.clock.now, partial(self._open_box, slot))
        box.append(item)

    def _open_box(self, slot: int) -> None:
        feeds = self.feeds.by_author
        for item in self._boxes.pop(slot):
            if not isinstance(item, FeedEntry):
                self._end_fetch(item)
            elif item.seq > len(feeds.get(item.author, ())):
                # The store asks the sender for what is missing.
                sender = self.world.by_peer[item.author]
                if self.world.is_reachable(self, sender):
                    self.pull(sender)
            else:
                self._read(item)

    def _read(self, entry: FeedEntry) -> None:
        if self.feeds.insert(entry):
            kind = type(entry.body)
            if kind in _OTHERS:  # most entries: nothing else looks at them
                self._finality_events.append(entry.seen)
                return
            self._feed_to_finality(entry)
            if kind is Contribution:
                self._feed_to_round(entry)
            else:
                self.removals.on_entry(entry)

    def _feed_to_finality(self, entry: FeedEntry, *, is_orphan: bool = False) -> None:
        seen = replace(entry.seen, is_orphan=True) if is_orphan else entry.seen
        self._finality_events.append(seen)
        body = entry.body
        if type(body) is Contribution:
            self.known[entry.name] = entry.author, body
            if body.payload in self.payloads:
                self.post_finality(finality_types.EntryPayloadHeld(entry.name))

    def _feed_to_round(self, entry: FeedEntry) -> None:
        body = entry.body
        if type(body) is Contribution and body.round > self.finality.last_final:
            held = body.payload in self.payloads
            self.post_round(round_types.ContributionSeen(entry.name, entry.author, body, held, self.now()))

    def fetch(self, names: tuple[Digest, ...]) -> None:
        """Start fetching the payloads of these contributions that are not here."""
        for name in names:
            if name in self.known:
                author, body = self.known[name]
                if body.payload not in self.payloads and body.payload not in self._fetching:
                    self._fetching.add(body.payload)
                    seconds = self.world.transfer_s(self, self.world.by_peer[author])
                    self.arrive(self.clock.now + seconds, body.payload)

    def _end_fetch(self, payload: Digest) -> None:
        if not self.world.can_serve(self, payload):
            self.arrive(self.clock.now + RETRY_S, payload)
            return
        self._fetching.discard(payload)
        self.hold(payload)

    def hold(self, payload: Digest) -> None:
        """The payload is on disk and verified."""
        self.payloads.add(payload)
        self.world.holders.setdefault(payload, set()).add(self.number)
        for name in self.world.names_of(payload):
            if name in self.known:
                number = self.known[name][1].round
                self.post_round(round_types.PayloadHeld(name, number, self.now()))
                self.post_finality(finality_types.EntryPayloadHeld(name))

    # --- the machines -----------------------------------------------------------------------------

    def post_round(self, event: round_types.Event) -> None:
        """Queue an event for the round machine."""
        self._round_events.append(event)

    def post_finality(self, event: finality_types.Event) -> None:
        """Queue an event for the finality machine."""
        self._finality_events.append(event)

    def _drain(self) -> None:
        life = self.life
        while self.life == life and (self._finality_events or self._round_events):
            if self._finality_events:
                seen, self._finality_events = self._finality_events, []
                self.finality, decided = finality_machine.step(self.finality, *seen)
                for action in decided:
                    self.perform_finality(action)
            elif self._round_events:
                happened, self._round_events = self._round_events, []
                self.round, todo = round_machine.step(self.round, *happened)
                for act in todo:
                    self._perform_round(act)

    def _perform_round(self, action: round_types.Action) -> None:
        match action:
            case round_types.FetchPayload(entry):  # most actions are fetches
                self.fetch((entry,))
            case round_types.StartTraining(number, _, _, after, late_s):
                self.worker.train(number, after, late_s)
            case round_types.Announce(pending):
                self.worker.announce(pending)
            case round_types.FoldRound(number, names):
                self.worker.fold(number, names)
            case round_types.PublishAck(number, members, name, view):
                self.write(Ack(number, name, view))
                self.post_finality(finality_types.RoundClosed(number, members))
            case round_types.PublishLease(activity, number):
                self.leases.announce(activity, number)
                self.post_finality(finality_types.Idle(activity != "training", self.now()))

    def perform_finality(self, action: finality_types.Action) -> None:
        """Do what the finality machine decided."""
        match action:
            case finality_types.Append(body):
                if isinstance(body, Follow) and body.epoch not in {part.epoch for part in self.finality.chain}:
                    self._leave_chain(body.round)
                self.write(body)
            case finality_types.CheckRound(number, names):
                self.worker.check(number, names)
            case finality_types.FetchMissing(_, entries, payloads):
                others = self.world.reachable(self)
                if entries and others:
                    self.later(0.5, lambda: self.pull(self.world.rng.choice(others)))
                self.fetch(payloads)
            case finality_types.FetchOrphans(number, entries, proposals):
                self._wanted.pop(number, None)
                if entries or proposals:
                    self._wanted[number] = action
            case finality_types.FinalizeRound():
                self.worker.add_final(action)
            case finality_types.SwitchEpoch(_, first):
                self._leave_chain(first)
            case finality_types.ReportDivergence(number, _, proposer, _, _):
                self.rows.append(Row(self.clock.now, "accused", number, peer=proposer))
            case finality_types.ReportEquivocation(number, author, _, _):
                self.rows.append(Row(self.clock.now, "accused", number, peer=author))

    def _leave_chain(self, first: int) -> None:
        """Mark the state; then end, and begin again without it."""
        if self.worker.marked is None:
            self.world.trace("other chain", self.number, first)
            self.worker.marked = first
            self.later(self.world.rng.uniform(0.1, 3.0), self._restart)
        elif first < self.worker.marked:
            self.worker.marked = first  # as ChainExit

    def _restart(self) -> None:
        self.crash()
        self.clock.after(1.0, self.boot)

    def _voting(self) -> tuple[PeerId, ...]:
        state = self.finality
        gone = state.epochs.excluded_from(state.deciding)
        here = (peer for peer in state.voters if peer not in gone)
        return tuple(peer for peer in here if not state.epochs.has_left(peer, state.deciding, state.epoch))

    def history(self) -> History:
        """All that the oracle reads."""
        own = self.feeds.by_author.get(self.peer, [])
        return History(
            peer=self.peer,
            is_liar=self.is_liar,
            is_up=self.is_up,
            chain=tuple(part.epoch for part in self.finality.chain) if self.life else (),
            applied=self.worker.applied,
            round=self.round.round if self.life else -1,
            is_stranded=self.is_up and self.worker.is_stranded(),
            voting=self._voting() if self.life else (),
            votes_against=frozenset(self.removals.votes),
            by_owner={peer: tuple(known) for peer, known in self.removals.by_owner.items()},
            forked=frozenset(self.feeds.forked),
            announced=tuple(entry.body.round for entry in own if isinstance(entry.body, Contribution)),
            rows=self.rows,
        )
