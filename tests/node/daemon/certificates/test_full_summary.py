"""A newcomer that begins with a certified summary ends in the state of one that replays every record of the run.

Worlds as in test_summary.py. Every node makes the summaries at the same rounds, and all of a chain write the same
bytes; every node cuts its ledger, so nobody has the records of the first rounds.
"""

import contextlib
import random
from collections import Counter

import pytest
from msgspec.structs import replace

from atoll.node.daemon.certificates.chosen_path import chosen_path
from atoll.node.daemon.certificates.full_summary import SummaryMaker, decode_full, encode_full
from atoll.node.daemon.certificates.reducers import ReducerHistory
from atoll.node.daemon.certificates.summary import resumed
from atoll.node.daemon.consensus import machine
from atoll.node.daemon.consensus.types import (
    EnterEpoch,
    FinalizeRound,
    ReportOtherSummary,
    Summarize,
    SummaryMade,
)
from atoll.p2p.ledger.history import Below
from atoll.protocols import codec
from atoll.protocols.errors import DecodeError, LocalFault
from atoll.protocols.ids import Digest, digest
from atoll.protocols.ledger.records import Admit, EpochBody, Proposal, SummaryProposal
from tests.node.daemon.certificates.test_summary import read_in, shaken
from tests.node.daemon.consensus.epoch_world import (
    LEASE,
    OWNER,
    PEERS,
    ROUNDS,
    RUN,
    Node,
    ShownNode,
    World,
    final,
)

KEPT, EVERY = 20, 8
MORE = pytest.mark.slow(slice="test_a_newcomer_with_a_summary_ends_as_one_with_all_records")
SEEN: Counter[str] = Counter()
MADE: dict[tuple, Digest] = {}
"""Blob id of each summary of a chain, whoever made it."""


class Feeds:
    """The part of `RecordHistory` that a summary reads, over a node's ledger, which may be cut."""

    def __init__(self, node):
        self.node = node

    def place_of(self, entry):
        return self.node.places.get(entry)

    def below(self, author, first, end, last, forks):
        feed = [each for each in self.node.feeds[author][first:end] if each[0] not in self.node.gone]
        found = [Below(name, body.round, isinstance(body, EpochBody | Admit)) for name, _, body in feed]
        return [record for record in found if record.stays(last, forks)]


class CertNode(Node):
    """Summarizes its chain, cuts its ledger behind summaries, and begins again with the newest one."""

    proven: frozenset = frozenset()
    """Authors whose two histories are proven here."""

    def __init__(self, number, probation=1, excise_rounds=0):
        self.cut_at, self.full, self.whole, self.old_finals = -1, None, [], {}
        self.places, self.gone = {}, set()
        super().__init__(number, probation, excise_rounds)

    def begin(self, chosen):
        state = replace(super().begin(chosen), summary_every=EVERY)
        return state if self.full is None else resumed(state, self.full.summary, chosen)

    def hear(self, entry):
        self.whole.append(entry)
        self.places[entry[0]] = self.counts.get(entry[1], 0)
        super().hear(entry)

    def boot(self, now):
        self.fulls, self.authors, self.maker = [], set(), SummaryMaker(Feeds(self))
        if not hasattr(self, "feeds"):
            super().boot(now)
            return
        finals = {at: names for at, names in {**self.old_finals, **self.finals}.items() if at <= self.cut_at}
        if self.full is not None:
            self.maker.resume(self.full)
            self.authors = {*self.full.summary.authors}
        try:
            super().boot(now)
        except LocalFault:
            SEEN["whole again"] += 1
            self.ledger, self.full, self.cut_at, finals, self.gone = list(self.whole), None, -1, {}, set()
            self.boot(now)
            return
        self.old_finals, self.finals = finals, {**finals, **self.finals}
        self.counted = {**finals, **self.counted}
        self.corrections = {**dict.fromkeys(finals, ()), **self.corrections}

    def do(self, action):
        match action:
            case FinalizeRound(number, names):
                super().do(action)
                authors = self.authors_in(number)
                self.authors.update(authors[name] for name in names)
                self.maker.on_counted((authors[name], name) for name in names)
            case EnterEpoch(_, _, voters):
                super().do(action)
                self.authors.update(voters)
            case Summarize(state):
                self.summarize(state)
            case ReportOtherSummary():
                raise AssertionError("all compute one summary")
            case _:
                super().do(action)
        if self.state.live and self.fulls and self.fulls[0].summary.round + KEPT <= self.state.last_final:
            self.cut(self.fulls.pop(0))

    def authors_in(self, number):
        return {entry: author for author, entry in self.rounds[number].items()}

    def summarize(self, state):
        full = self.maker.make(state, ReducerHistory(), self.proven)
        if full is None:
            self.on_none()
            return
        assert full.summary.authors == tuple(sorted(self.authors))
        chain = tuple(segment.epoch for segment in state.chain), state.last_final, *sorted(self.proven)
        assert MADE.setdefault(chain, full.blob) == full.blob, "two summaries of one chain"
        self.fulls.append(decode_full(encode_full(full)))
        SEEN["made"] += 1
        self.feed(SummaryMade(state.last_final, full.blob))

    def on_none(self):
        raise AssertionError("all feeds are here")

    def cut(self, full):
        """As p2p/ledger/history.py does."""
        floors = {author: self.places[entry] for author, entry in full.places.items()}
        last, forks = full.summary.round, full.summary.forks

        def stays(entry):
            name, author, body = entry
            is_below = author in floors and self.places[name] < floors[author]
            return not is_below or Below(name, body.round, isinstance(body, EpochBody | Admit)).stays(last, forks)

        self.gone.update(entry[0] for entry in self.ledger if not stays(entry))
        self.ledger = [entry for entry in self.ledger if stays(entry)]
        self.full, self.cut_at = full, last
        SEEN["cut"] += 1


class ShownCertNode(ShownNode, CertNode):
    """Of a run whose voters must have shown work."""


def newcomer(source, ledger, full):
    """A member of no round before, with the chain of `source`, after the replay of these records."""
    node = type(source).__new__(type(source))
    node.__dict__.update(source.__dict__)
    node.peer, node.ledger, node.finals, node.heard, node.full = PEERS[7], list(ledger), {}, {}, full
    node.cut_at, node.old_finals, node.views, node.gone = -1, {}, {}, source.gone if full else set()
    chosen = chosen_path([(author, body) for _, author, body in ledger], source.peer)
    node.begin = lambda _: _begun(node, chosen, full)
    node.cut = lambda full: None
    node.boot(source.now)
    return node


def _begun(node, chosen, full):
    state = machine.begin(
        RUN, node.peer, ROUNDS, OWNER, lease_s=LEASE, tally=node.tally, chosen=chosen, summary_every=EVERY
    )
    return state if full is None else resumed(state, full.summary, chosen)


def known_to_a_newcomer(node):
    """What a summary lets it ask for: the records below the floors by name, and each feed from its floor on."""
    full, here, places = node.full, {name for name, _, _ in node.ledger}, node.places
    named = {name for floor in full.floors for name in floor.records}
    assert named <= here, "what a summary names is in a ledger that is cut there"
    floors = {author: places[entry] for author, entry in full.places.items()}
    from_floor = {name for name, author, _ in node.whole if places[name] >= floors.get(author, 0)}
    assert from_floor <= here, "no feed has a gap from its floor on"
    return [entry for entry in node.whole if entry[0] in named | from_floor]


def compare(node):
    whole = newcomer(node, node.whole, None)
    ours = newcomer(node, known_to_a_newcomer(node), node.full)
    one, other = ours.state, whole.state
    for name in ("last_final", "voters", "tally", "accepted", "chain", "planned", "held", "attempt"):
        assert getattr(one, name) == getattr(other, name), name
    assert read_in(one) == read_in(other)
    assert replace(one.epochs, voted={}) == replace(other.epochs, voted={})
    newer = [{a: at for a, at in state.epochs.voted.items() if at > node.cut_at} for state in (one, other)]
    assert newer[0] == newer[1]
    for at in range(max(node.cut_at, one.last_final - KEPT) + 1, one.last_final + 1):
        assert (one.decided[at], one.electorate(at)) == (other.decided[at], other.electorate(at))
    # It certifies what the others do, from the next summary on.
    later = [full for full in whole.fulls if full.summary.round > node.full.summary.round]
    assert ours.fulls == later
    SEEN["newcomer"] += 1
    SEEN["its summaries"] += len(later)


@pytest.fixture(autouse=True)
def window(monkeypatch):
    """Forks are looked at as far back as records are kept, as in the product."""
    monkeypatch.setattr(machine, "DECIDED_KEPT", KEPT)
    SEEN.clear()
    MADE.clear()


@pytest.mark.parametrize(
    ("probation", "excludes", "kind"),
    [
        pytest.param(1, False, CertNode, marks=MORE),
        pytest.param(4, False, CertNode, marks=MORE),
        pytest.param(1, True, CertNode, marks=MORE),
        (8, True, CertNode),
        (4, False, ShownCertNode),
        pytest.param(8, True, ShownCertNode, marks=MORE),
    ],
)
@pytest.mark.parametrize("block", [0, pytest.param(1, marks=MORE), pytest.param(2, marks=MORE)])
def test_a_newcomer_with_a_summary_ends_as_one_with_all_records(block, probation, excludes, kind):
    for seed in range(block * 2, block * 2 + 2):
        MADE.clear()
        world = shaken(seed, probation, excludes, kind)
        world.run(120)
        for node in world.nodes:
            if node.full is not None:
                compare(node)
    assert SEEN["newcomer"] > 2, SEEN
    assert SEEN["its summaries"] > 4, SEEN
    assert SEEN["cut"] > 4, SEEN


def certified(world):
    """The rounds of which a final proposal names the summary, as node 0 finds them."""
    node = world.nodes[0]
    proposals = {body.round: body for _, _, body in node.whole if isinstance(body, SummaryProposal)}
    return {at for at in proposals if at <= final(node)}


def test_the_first_attempt_of_the_rounds_that_are_due_names_the_summary():
    world = World(3, 4, 1, node=CertNode)
    world.run(200)
    node = world.nodes[0]
    due = set(range(EVERY, final(node) + 1, EVERY))
    assert certified(world) == due
    plain = {body.round for _, _, body in node.whole if isinstance(body, Proposal)} - due
    assert plain >= set(range(final(node) + 1)) - due
    for _, _, body in node.whole:
        if isinstance(body, SummaryProposal):
            chain = (b"",), body.round - 1
            assert (body.ballot.attempt, body.summary) == (0, MADE[chain])


class Mistaken(CertNode):
    """Finds other bytes than all others; what it thinks of theirs it remembers."""

    def boot(self, now):
        self.reports = []
        super().boot(now)

    def do(self, action):
        match action:
            case ReportOtherSummary():
                self.reports.append(action)
            case Summarize(state):
                self.feed(SummaryMade(state.last_final, digest(b"other")))
            case _:
                super().do(action)


class Careful(CertNode):
    def do(self, action):
        if isinstance(action, ReportOtherSummary):
            SEEN["reported"] += 1
        else:
            super().do(action)


def test_one_that_finds_another_summary_stops_neither_rounds_nor_the_certificates_of_the_others():
    world = World(4, 4, 1, node=Careful)
    world.nodes[3] = Mistaken(3)
    world.run(400)
    node, other = world.nodes[0], world.nodes[3]
    assert min(map(final, world.nodes)) > 60
    # Its own proposals get no vote of the others, and theirs none of it.
    named = {body.summary for _, _, body in node.whole if isinstance(body, SummaryProposal)}
    assert digest(b"other") in named, "it proposed its own"
    assert SEEN["reported"] >= 3
    votes = {body.proposal: author for _, author, body in node.whole if hasattr(body, "proposal")}
    mine = {name for name, _, body in node.whole if getattr(body, "summary", None) == digest(b"other")}
    assert not mine & votes.keys() or {votes[name] for name in mine & votes.keys()} == {other.peer}
    assert other.reports
    assert all(report.theirs in MADE.values() for report in other.reports)
    assert len(certified(world)) >= 5
    later = [body for _, _, body in node.whole if isinstance(body, Proposal) and body.ballot.attempt]
    assert {body.round for body in later if body.round % EVERY == 0}, "where it was to propose first"
    assert not any(isinstance(body, SummaryProposal) for body in later)


class Places:
    """A feed whose author contributed to rounds in another order, and one entry of it that is not here."""

    def place_of(self, entry):
        return {b"first": 3, b"second": 7, b"third": 5}.get(entry)

    def below(self, author, first, end, last, forks):
        assert (author, last) == (PEERS[1], 9)
        found = [Below(Digest(b"%d" % at), at, at in (1, 4)) for at in range(first, end)]
        return [record for record in found if record.stays(last, forks)]


def test_a_floor_is_the_last_place_that_counts_and_never_falls():
    state = replace(machine.begin(RUN, OWNER, ROUNDS, OWNER), last_final=9)
    maker, floors = SummaryMaker(Places()), []
    for name in (b"first", b"second", b"third"):
        maker.on_counted([(PEERS[1], name)])
        floors += maker.make(state, ReducerHistory()).floors
    assert [floor.entry for floor in floors] == [b"first", b"second", b"second"]
    assert [floor.records for floor in floors] == [(b"1",), (b"1", b"4"), (b"1", b"4")]
    maker.on_counted([(PEERS[1], b"of another history")])
    assert maker.make(state, ReducerHistory()) is None


def test_bytes_that_are_no_summary_are_refused():
    world = World(1, 3, 1, node=CertNode)
    world.run(160)
    full = world.nodes[0].full
    data = encode_full(full)
    assert encode_full(decode_full(data)) == data
    for wrong in (b"", data[:-1], data + b"\0"):
        with pytest.raises(DecodeError):
            decode_full(wrong)
    with pytest.raises(LocalFault, match="version 9"):
        decode_full(codec.encode(replace(full, version=9)))
    rng = random.Random(0)
    for _ in range(2000):
        at = rng.randrange(len(data))
        # Either no summary, or one of another blob id: nothing else is raised.
        with contextlib.suppress(DecodeError, LocalFault):
            decode_full(data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :])
