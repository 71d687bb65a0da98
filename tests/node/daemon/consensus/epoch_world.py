"""A tiny world on virtual time, one step a second, for the machine of finality and its epochs.

Every node keeps a ledger; it trains a round every few steps and never waits for finality. Entries of one author
arrive in order, between connected nodes only. A lease lives for LEASE steps after the last contact. A crash
forgets the machine; the ledger stays, as SQLite does.
"""

import math
import random
from collections import Counter

import msgspec
from msgspec.structs import replace

from atoll.node.daemon.certificates.chosen_path import chosen_path
from atoll.node.daemon.consensus import machine as finality
from atoll.node.daemon.consensus.forks import look_for_better_chain
from atoll.node.daemon.consensus.types import (
    Append,
    AppendRefused,
    CheckDone,
    CheckRound,
    CorrectionsHeld,
    EnterEpoch,
    EntryPayloadHeld,
    EntrySeen,
    FinalApplied,
    FinalityTick,
    FinalizeRound,
    MembersSeen,
    ReplayDone,
    ReportDivergence,
    RoundClosed,
    SwitchEpoch,
)
from atoll.protocols.audits.shown_work import ShownWork
from atoll.protocols.audits.standing import audited_by
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Digest, PeerId, Round, RunId, digest
from atoll.protocols.ledger.probation import Tally
from atoll.protocols.ledger.records import (
    AuditedContribution,
    Contribution,
    Leave,
    Prepare,
    Promise,
    Proposal,
    Verdict,
    Vote,
)
from atoll.protocols.ledger.set_limit import Arrivals

RUN = RunId(digest(b"epochs"))
PEERS = [Identity(bytes([number + 1]) * 32).peer_id for number in range(8)]
OWNER = PEERS[0]
LEASE = 20
ROUND = 4
PATIENCE = 2 * ROUND
ROUNDS = 5000
ALONE = 10
"""A node that finds nobody for so long goes on by itself."""

OF_ROUNDS = (Contribution, Prepare, Promise, Proposal, Vote)
"""Most entries: all but those about epochs and members."""


def state_of(number, names, corrections=()):
    """A state is of one set, and of the sets before that it makes smaller."""
    changed = [repr(one).encode() for one in corrections]
    return digest(b"state", number.to_bytes(2, "big"), *sorted(names), *changed)


class Node:
    def __init__(self, number: int, probation: int = 1, excise_rounds: int = 0) -> None:
        self.tally = Tally(probation)
        self.probation, self.excise_rounds = probation, excise_rounds
        self.peer = PEERS[number]
        self.ledger: list[tuple] = []
        self.feeds: dict[PeerId, list[tuple]] = {}
        self.rounds: dict[int, dict[PeerId, bytes]] = {}
        """Contributions of each round by author."""
        self.counts: dict[PeerId, int] = {}
        self.views: dict[int, tuple] = {}
        self.heard: dict[PeerId, float] = {}
        self.round = 0
        self.trained_at = 0.0
        self.is_up = True
        self.seen_at = -math.inf
        """When it was last up; that of before for two leases after it was down."""
        self.down_s, self.came_up = math.inf, 0.0
        self.keeps_back: tuple[type, ...] = ()
        """Kinds of entries that a liar does not write where an honest node would."""
        self.finals: dict[int, tuple] = {}
        self.boot(0.0)

    def boot(self, now: float) -> None:
        self.finals, self.now, self.heard = {}, now, {}
        self.counted: dict[int, tuple] = {}
        """What is left of each final set."""
        self.corrections: dict[int, tuple] = {}
        self.events: list[object] = []
        self.steps = 0
        self.segments: list[tuple] = []
        self.switch: SwitchEpoch | None = None
        chosen = chosen_path([(author, body) for _, author, body in self.ledger], self.peer)
        self.state = self.begin(chosen)
        self.feed(FinalityTick(now))
        for entry in list(self.ledger):
            self.replay(entry)
        self.state = replace(self.state, patience_s=PATIENCE)
        self.up_since = now

    def begin(self, chosen: tuple) -> finality.finality_types.FinalityState:
        more = {"chosen": chosen, "tally": self.tally, "excise_rounds": self.excise_rounds}
        return finality.begin(RUN, self.peer, ROUNDS, OWNER, lease_s=LEASE, **more)

    def note_up(self, now: float) -> None:
        """It is up; whether it was down before is known by the time since it was."""
        if now - self.seen_at > 1.0:
            self.down_s, self.came_up = now - self.seen_at, now
        self.seen_at = now

    def go_live(self) -> None:
        """The replay is over, and ledgers were compared."""
        own = max((at for at, book in self.rounds.items() if self.peer in book), default=-1)
        self.feed(ReplayDone(self.down_s if self.now - self.came_up < 2 * LEASE else 0.0, own))
        for number, names in self.views.items():
            if number > self.state.last_final:
                self.feed(RoundClosed(Round(number), names))

    def feed(self, event: object) -> None:
        """Events that actions bring come after it, as in the driver's queue."""
        self.events.append(event)
        if len(self.events) > 1:
            return
        while self.events:
            self.state, actions = finality.step(self.state, self.events[0])
            self.check_looks(self.events[0])
            self.check_settled()
            for action in actions:
                self.do(action)
            self.events.pop(0)

    def check_looks(self, event: object) -> None:
        """What was found once is what is found now. Before a first look, there is nothing to compare."""
        # A look costs as much as a step. Where a vote was overlooked, the steps after it show it as well.
        is_rare = isinstance(event, EntrySeen) and not isinstance(event.body, OF_ROUNDS)
        if self.state.unrivalled and (is_rare or self.steps % 8 == 0):
            _, again = look_for_better_chain(replace(self.state, unrivalled=()))
            assert look_for_better_chain(self.state)[1] == again, "it looked at too little"

    def check_settled(self) -> None:
        """Nothing moves in a settled state. Every eighth step, because it costs as much as a step."""
        self.steps += 1
        if self.state.settled and self.steps % 8 == 0 and not isinstance(self.events[0], AppendRefused):
            fresh = replace(self.state, settled=(), unrivalled=())
            moved, actions = finality.step(fresh)
            assert (replace(moved, settled=(), unrivalled=()), actions) == (fresh, []), "it was not settled"

    def do(self, action: object) -> None:
        match action:
            case Append(body) if isinstance(body, self.keeps_back):
                self.feed(AppendRefused())
            case Append(body):
                self.check_tally()
                self.write(body)
            case CheckRound(number, names, excised, corrections):
                self.feed(CheckDone(number, names, state_of(number, names, corrections), excised))
            case FinalizeRound(number, names, state, corrections):
                assert state == state_of(number, names, corrections)
                assert number not in self.finals
                self.finals[number] = self.counted[number] = names
                self.corrections[number] = corrections
                for one in corrections:
                    assert self.counted[one.round] == one.before, "it does not begin with what was left"
                    self.counted[one.round] = one.after
                check_set(self, number, (names, corrections))
                self.feed(FinalApplied(number))
            case EnterEpoch(epoch, first, voters):
                self.segments.append((epoch, int(first), voters))
            case SwitchEpoch():
                self.switch = action
            case ReportDivergence():
                raise AssertionError("nobody says a wrong state")

    def check_tally(self) -> None:
        """What this node counts when it votes follows from the final sets of its chain, and from nothing else."""
        if self.probation > 1:
            authors = {entry: author for each in self.rounds.values() for author, entry in each.items()}
            found = Counter(authors[name] for names in self.finals.values() for name in names)
            assert self.state.tally.counts == found
            assert self.state.tally.rounds == self.state.deciding

    def write(self, body: object) -> None:
        self.hear((self.name_of(self.counts.get(self.peer, 0), body), self.peer, body))

    def name_of(self, seq: int, body: object) -> Digest:
        return digest(self.peer.encode(), seq.to_bytes(4, "big"), repr(body).encode())

    def hear(self, entry: tuple) -> None:
        self.ledger.append(entry)
        self.feeds.setdefault(entry[1], []).append(entry)
        if isinstance(entry[2], Contribution):
            self.rounds.setdefault(entry[2].round, {})[entry[1]] = entry[0]
        self.counts[entry[1]] = self.counts.get(entry[1], 0) + 1
        self.replay(entry)

    def replay(self, entry: tuple) -> None:
        if isinstance(entry[2], Contribution):
            self.feed(EntryPayloadHeld(entry[0]))
        self.feed(EntrySeen(*entry))

    def known(self, number: int) -> tuple:
        """The own set of a round; work of the excluded only where there is no other, as in the round machine."""
        book, gone = self.rounds.get(number, {}), self.state.epochs.excluded_from(number)
        left = [entry for author, entry in book.items() if author not in gone]
        return tuple(sorted(left or book.values()))

    def train(self, now: float) -> None:
        """One round every ROUND steps; the round before is closed with what is here."""
        if now - self.trained_at < ROUND:
            return
        self.trained_at = now
        if self.peer in self.rounds.get(self.round, {}):
            self.round += 1
        self.round = max(self.round, max(self.rounds, default=0))
        if self.peer not in self.rounds.get(self.round, {}):
            payload = digest(self.peer.encode(), self.round.to_bytes(4, "big"))
            self.write(self.contribution(Contribution(Round(self.round), digest(b"base"), payload, 1, 1, 64, 1.0)))

    def contribution(self, plain: Contribution) -> Contribution:
        """What it writes about its work in a round."""
        return plain

    def close(self) -> None:
        """Close every round before this one; again where late work came."""
        for number in range(self.state.last_final + 1, self.round):
            view = self.known(number)
            if view and view != self.views.get(number):
                self.views[number] = view
                self.feed(RoundClosed(Round(number), view))

    def stop(self) -> None:
        """Leave in good order."""
        self.write(Leave(Round(self.round)))


class ShownNode(Node):
    """Of a run whose voters must have shown work: it audits, and finds work in all that it audits."""

    def __init__(self, number: int, probation: int = 1, excise_rounds: int = 0) -> None:
        super().__init__(number, probation, excise_rounds)
        self.tally = ShownWork(probation, owner=OWNER, each=3)
        self.boot(0.0)

    def contribution(self, plain: Contribution) -> Contribution:
        """With its verdicts on the newest set that has its work."""
        mine = {by_author.get(self.peer) for by_author in self.rounds.values()}
        verdicts: tuple[Verdict, ...] = ()
        for number in sorted(self.finals, reverse=True)[:4]:
            names = self.finals[number]
            own = next((name for name in names if name in mine), None)
            if own is not None:
                verdicts = tuple(Verdict(name, 64) for name in audited_by(names, 3).get(own, ()))
                break
        return AuditedContribution(*msgspec.structs.astuple(plain), verdicts=verdicts)


class BoundedNode(ShownNode):
    """Of a run whose final sets name one newcomer, or as many as others."""

    def __init__(self, number: int, probation: int = 1, excise_rounds: int = 0) -> None:
        super().__init__(number, probation, excise_rounds)
        self.tally = msgspec.structs.replace(self.tally, newcomers=1)
        self.boot(0.0)

    def known(self, number: int) -> tuple[Digest, ...]:
        """Its own set, with no more newcomers than there may be."""
        author_of = {entry: author for author, entry in self.rounds.get(number, {}).items()}
        view = super().known(number)
        named = self.state.newcomer_order(b"").named({author_of[entry] for entry in view}, Arrivals())
        return tuple(entry for entry in view if author_of[entry] in named)


DECIDED: dict[tuple, tuple] = {}


def check_set(node, number, names):
    # One final set of a round within one epoch, whoever decides it.
    key = (node.state.epoch if number >= node.state.chain[-1].first else _epoch_at(node, number), number)
    assert DECIDED.setdefault(key, names) == names, f"round {number} has two final sets in one epoch"


def _epoch_at(node, number):
    return next(s.epoch for s in reversed(node.state.chain) if s.first <= number)


FAULTS = ("stop", "kill", "cut", "heal", "back", "restart")


class World:
    def __init__(
        self,
        seed: int,
        count: int,
        probation: int = 1,
        excise_rounds: int = 0,
        node: type[Node] = Node,
    ) -> None:
        DECIDED.clear()
        self.rng = random.Random(seed)
        self.nodes = [node(number, probation, excise_rounds) for number in range(count)]
        self.excises = excise_rounds > 0
        self.side = {node.peer: 0 for node in self.nodes}
        self.now = 0.0

    def up(self) -> list[Node]:
        return [node for node in self.nodes if node.is_up]

    def linked(self, one: Node, other: Node) -> bool:
        return one is not other and one.is_up and other.is_up and self.side[one.peer] == self.side[other.peer]

    def spread(self, chance: float = 0.8) -> None:
        for node in self.nodes:
            for other in self.nodes:
                if not self.linked(node, other) or self.rng.random() > chance:
                    continue
                for peer in PEERS[: len(self.nodes)]:
                    have, theirs = node.counts.get(peer, 0), other.counts.get(peer, 0)
                    # A node that came up takes all before it votes; later entries trickle in.
                    most = self.rng.randint(1, 30) if node.state.live else theirs
                    if theirs > have:
                        for entry in other.feeds[peer][have : have + most]:
                            node.hear(entry)
                node.heard[other.peer] = self.now

    def step(self) -> None:
        self.now += 1.0
        for node in self.up():
            node.note_up(self.now)
            live = {peer for peer, at in node.heard.items() if self.now - at < LEASE}
            lost = {peer for peer in live if self.now - node.heard[peer] > 1.0}
            node.feed(MembersSeen(frozenset(live), frozenset(lost)))
            node.feed(FinalityTick(self.now))
            if self.excises:  # each lacks payloads at times
                held = frozenset(peer for peer in PEERS if self.rng.random() < 0.5)
                node.feed(CorrectionsHeld(held))
            is_alone = not any(self.linked(node, other) for other in self.nodes)
            if not node.state.live and (
                node.heard.keys() & live or (is_alone and self.now - node.up_since > ALONE)
            ):
                node.go_live()
            if node.switch is not None:
                node.boot(self.now)
            node.train(self.now)
            node.close()
        self.spread()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def strike(self, kind: str, node: Node, rng: random.Random) -> None:
        """One of FAULTS; nothing where it does not apply to the node. A cut puts each on a side by lot."""
        if kind == "stop" and node.is_up:
            node.stop()
            for _ in range(rng.randint(0, 3)):
                self.spread(0.5)
            node.is_up = False
        elif kind == "kill":
            node.is_up = False
        elif kind in ("cut", "heal"):
            for peer in self.side:
                self.side[peer] = rng.randint(0, 1) if kind == "cut" else 0
        elif (kind == "back" and not node.is_up) or (kind == "restart" and node.is_up):
            node.is_up = True
            node.boot(self.now)

    def agree(self) -> None:
        """Everybody that is up decided the same, and not long ago."""
        up = self.up()
        first = up[0]
        for node in up[1:]:
            assert [s.epoch for s in node.state.chain] == [s.epoch for s in first.state.chain]
            assert node.state.epochs.voted_out == first.state.epochs.voted_out
            for number in node.finals.keys() & first.finals.keys():
                assert node.finals[number] == first.finals[number]
                assert node.corrections[number] == first.corrections[number]
                assert node.counted[number] == first.counted[number]


def final(node: Node) -> int:
    return node.state.last_final
