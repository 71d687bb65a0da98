"""Members and authors without work: who is waited for, and what is forgotten when the ledger lets one go."""

import random
from collections.abc import Callable
from types import SimpleNamespace

from msgspec.structs import replace

from atoll.node.daemon.consensus import machine as finality_machine
from atoll.node.daemon.consensus import types as finality_types
from atoll.node.daemon.coordinator.contribution_sets import ContributionIndex
from atoll.node.daemon.coordinator.driver import Driver
from atoll.node.daemon.coordinator.newcomers import NewcomerWatch
from atoll.node.daemon.removal.removals import Removals
from atoll.node.daemon.rounds import types as round_types
from atoll.node.daemon.rounds.machine import begin, step
from atoll.node.daemon.rounds.state import RoundConfig
from atoll.node.daemon.rounds.trials import FEW, TRIAL_ROUNDS, Trials
from atoll.node.runs.presets import preset
from atoll.p2p.ledger.newcomers import NewcomerQuota, Newcomers
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId, Round, RunId, digest
from atoll.protocols.ledger.records import Ballot, Contribution, Proposal
from atoll.protocols.ledger.registers import Activity, Lease

OWNER, ANN, EVE = (PeerId(name) for name in ("owner", "ann", "eve"))
CROWD = [PeerId(f"eve{number}") for number in range(40)]


def work(number: int, what: bytes) -> Contribution:
    return Contribution(Round(number), digest(b"base"), digest(what), 1, 1, 64, 1.0)


def lease(activity: Activity, number: int) -> Lease:
    return Lease(activity, Round(number), Round(-1), b"", Round(-1), 0.0, 0.0, 0.0, "")


def at_work(peers: list[PeerId]) -> dict[PeerId, Lease]:
    return dict.fromkeys(peers, lease("training", 3))


class Net:
    """Remembers what the budget was told."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def __getattr__(self, name: str):
        return lambda what, *more: self.told.append((name, [*what] if not isinstance(what, str) else what, *more))


def test_few_are_all_waited_for() -> None:
    trials = Trials(lambda peer: peer)
    assert trials.choose(at_work(CROWD[:FEW]), 0, [], 3) == {*CROWD[:FEW]}
    assert trials.choose(at_work(CROWD), len(CROWD), [], 3) == {*CROWD}


def test_few_that_never_work_are_waited_for_in_fewer_and_fewer_rounds() -> None:
    """One that takes long to come has another trial, and one that still loads has its first one before it."""
    trials = Trials(lambda peer: peer)

    def is_awaited(activity: Activity, number: int) -> bool:
        return bool(trials.choose({ANN: lease(activity, number)}, 2, [], number))

    assert all(is_awaited("syncing", number) for number in range(20))
    assert all(is_awaited("training", 20) for _ in range(20)), "it is in its first round"
    awaited = [number for number in range(20, 220) if is_awaited("training", number)]
    starts = [20 + TRIAL_ROUNDS * times for times in (0, 4, 8, 16, 32, 64)]
    trial = [start + at for start in starts for at in range(TRIAL_ROUNDS)]
    assert awaited == [number for number in trial if number < 220]
    assert is_awaited("paused", 24), "it costs nobody anything"


def test_of_many_a_few_connected_ones_have_their_turns() -> None:
    trials = Trials(lambda peer: peer, random.Random(1))
    near = CROWD[:10]
    first = trials.choose(at_work(CROWD), 3, near, 5)
    assert len(first) == FEW
    assert first <= {*near}
    assert trials.choose(at_work(CROWD), 3, near, 5 + TRIAL_ROUNDS - 1) == first
    second = trials.choose(at_work(CROWD), 3, near, 5 + TRIAL_ROUNDS)
    assert len(second) == FEW
    assert not second & first, "each has one trial"
    third = trials.choose(at_work(CROWD), 3, near, 5 + 2 * TRIAL_ROUNDS)
    assert first | second | third == {*near}
    assert trials.choose(at_work(CROWD), 3, near, 5 + 3 * TRIAL_ROUNDS) == set()


def test_a_block_does_not_keep_another_waiting() -> None:
    near = [*CROWD, ANN]
    for seed in range(20):
        trials = Trials(lambda peer: "here" if peer == ANN else "there", random.Random(seed))
        assert ANN in trials.choose(at_work(near), 3, near, 0)


def test_what_is_pruned_is_forgotten_unless_it_is_held_or_named() -> None:
    held, named, lost = work(0, b"held"), work(0, b"named"), work(0, b"lost")
    stopped = []
    fetcher = SimpleNamespace(is_held=lambda record: record == held, stop=stopped.append)
    machines = SimpleNamespace(
        round=begin(RoundConfig(OWNER, rounds=9, quorum_256=128, grace_256=256, lease_s=60.0)),
        finality=finality_machine.begin(RunId(digest(b"run")), OWNER, 9, OWNER),
    )

    def feed_round(event: round_types.Event) -> None:
        machines.round, _ = step(machines.round, event)

    def feed_finality(event: finality_types.Event) -> None:
        machines.finality, _ = finality_machine.step(machines.finality, event)

    machines.feed_round, machines.feed_finality = feed_round, feed_finality
    index = ContributionIndex(OWNER, fetcher)
    watch = NewcomerWatch(
        context=SimpleNamespace(now=lambda: 1.0), net=Net(), machines=machines, contributions=index
    )
    authors = {}
    for who, record in ((ANN, held), (EVE, named), (CROWD[0], lost)):
        name = authors[who] = digest(who.encode())
        index.add(name, who, record)
        feed_round(round_types.ContributionSeen(name, who, record, record == held, 0.0))
        feed_finality(finality_types.EntrySeen(name, who, record))
    feed_finality(finality_types.EntryPayloadHeld(authors[ANN]))
    proposal = Proposal(Round(0), Ballot(0, OWNER), (authors[EVE],), digest(b"state"))
    feed_finality(finality_types.EntrySeen(digest(b"proposal"), OWNER, proposal))
    for who in authors:
        watch.on_pruned(who)
    assert set(machines.round.books[0].authors.values()) == {ANN}
    assert set(machines.finality.books[0].contributions) == {authors[ANN], authors[EVE]}
    assert (authors[ANN] in index, authors[CROWD[0]] in index) == (True, False)
    assert stopped == [named, lost]


def test_all_parts_hear_of_what_is_pruned_after_finality() -> None:
    told: list[tuple[str, PeerId]] = []

    def part(name: str) -> Callable[[PeerId], None]:
        return lambda author: told.append((name, author))

    removals = Removals.__new__(Removals)
    removals.apart = SimpleNamespace(forget=part("choices"))  # type: ignore[assignment]
    removals.reducer = SimpleNamespace(forget_author=part("reduction"))  # type: ignore[assignment]
    newcomers = SimpleNamespace(on_pruned=part("finality"))
    driver = SimpleNamespace(
        queue=SimpleNamespace(post=lambda event: event()), newcomers=newcomers, removals=removals
    )
    Driver.on_pruned(driver, EVE)  # type: ignore[arg-type]
    assert told == [("finality", EVE), ("choices", EVE), ("reduction", EVE)]


def test_what_a_voter_names_is_kept_and_required() -> None:
    net, known, unknown = Net(), digest(b"known"), digest(b"unknown")
    index = ContributionIndex(OWNER, SimpleNamespace(is_held=lambda record: False))
    index.add(known, ANN, work(0, b"known"))
    finality = finality_machine.begin(RunId(digest(b"run")), OWNER, 9, OWNER)
    watch = NewcomerWatch(
        context=SimpleNamespace(), net=net, machines=SimpleNamespace(finality=finality), contributions=index
    )
    proposal = Proposal(Round(0), Ballot(0, OWNER), tuple(sorted((known, unknown))), digest(b"state"))
    watch.on_entry(SimpleNamespace(author=EVE, body=proposal))
    assert net.told == [], "who is no voter names what it likes"
    watch.on_entry(SimpleNamespace(author=OWNER, body=proposal))
    assert net.told == [("keep", [ANN]), ("require", [unknown], OWNER)]
    watch.on_final([known])
    assert net.told[2:] == [("accept", [ANN])]


def test_members_of_an_epoch_are_accepted_and_worked_in_no_round_by_that() -> None:
    calls = []
    log = SimpleNamespace(event=lambda name, **values: None)
    net = SimpleNamespace(accept=lambda authors, by_work=True: calls.append((authors, by_work)))
    driver = SimpleNamespace(context=SimpleNamespace(log=log), net=net)
    Driver._perform_finality(driver, finality_types.EnterEpoch(digest(b"epoch"), Round(3), (ANN, EVE)))
    assert calls == [((ANN, EVE), False)]


def test_of_a_summary_only_the_authors_of_its_newest_set_worked_in_a_round() -> None:
    calls = []
    spec = preset("tiny", Identity(bytes(32)).peer_id, 1)
    machines = SimpleNamespace(finality=finality_machine.begin(RunId(digest(b"run")), OWNER, 9, OWNER))
    driver = SimpleNamespace(
        context=SimpleNamespace(spec=spec, me=OWNER, now=lambda: 1.0),
        net=SimpleNamespace(
            entries=list, orphans=list, accept=lambda authors, by_work=True: calls.append((authors, by_work))
        ),
        history=SimpleNamespace(
            begin=lambda begun, chosen: replace(begun, voters=(ANN,), last_final=5),
            authors=(ANN, EVE, OWNER),
            reducers=None,
        ),
        reducer=SimpleNamespace(resume=lambda reducers: None),
        removals=SimpleNamespace(step=lambda: None),
        machines=machines,
        finality=machines.finality,
        _feed_orphans=lambda entries: None,
    )
    Driver._replay(driver)
    assert calls == [((ANN, EVE, OWNER), False), ((ANN,), True)]
    newcomers = Newcomers(NewcomerQuota(), lambda: 1.0)
    for authors, by_work in calls:
        newcomers.accept(authors, by_work=by_work)
    assert not newcomers.is_tried(PeerId("stranger")), "there is a history, as after any final round"
    assert newcomers.is_accepted(EVE)
    assert (newcomers.shares._newest, newcomers.shares._rounds) == ({ANN}, {ANN: 1})


def test_a_payload_is_the_work_of_whoever_named_it_first() -> None:
    """One piece of noise would else take all places of those that worked."""
    net = Net()
    index = ContributionIndex(OWNER, SimpleNamespace(is_held=lambda record: True))
    for number, who in enumerate((EVE, *CROWD)):
        index.add(digest(who.encode()), who, work(number % 3, b"noise"))
    index.add(digest(b"ann"), ANN, work(0, b"work"))
    watch = NewcomerWatch(context=None, net=net, machines=None, contributions=index)
    for what in (b"noise", b"work", b"noise", b"unknown"):
        watch.on_held(digest(what))
    assert net.told == [("vouch", EVE), ("vouch", ANN), ("vouch", EVE)]


def test_rounds_learn_who_comes_first_once_for_each_change() -> None:
    finality = finality_machine.begin(RunId(digest(b"run")), OWNER, 9, OWNER)
    machines = SimpleNamespace(
        round=begin(RoundConfig(OWNER, rounds=9, quorum_256=128, grace_256=256, lease_s=60.0)), finality=finality
    )
    fed = []

    def feed_round(event: round_types.Event) -> None:
        fed.append(event)
        machines.round, _ = step(machines.round, event)

    machines.feed_round = feed_round
    watch = NewcomerWatch(
        context=SimpleNamespace(now=lambda: 1.0), net=Net(), machines=machines, contributions=None
    )
    for accepted in ((), (ANN,), (ANN,)):
        machines.finality = replace(finality, accepted=frozenset(accepted))
        watch.step()
        watch.step()
        assert machines.round.set_rules.seniority == machines.finality.seniority
    assert len(fed) == 2
