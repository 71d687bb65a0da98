"""Push trees on simulated time: everybody gets every message, few copies, and no neighbour can do much harm."""

import random
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.p2p.gossip import push_trees
from atoll.p2p.gossip.push_trees import (
    ANNOUNCE_S,
    ANNOUNCERS,
    ANSWER_S,
    AUTHORS,
    FIRST_PUSHES,
    ID_BYTES,
    IDS_MAX,
    KNOWN,
    OWN_PUSHES,
    STRIKES,
    WAIT_S,
    WANTED,
    WANTED_OF_ONE,
    Ids,
    PushTrees,
)
from atoll.protocols import codec
from atoll.protocols.errors import DecodeError
from tests.p2p.gossip.simulated import (
    Arrived,
    Lost,
    Push,
    Repeated,
    Sim,
    Tell,
    Ticked,
    Told,
    message_id,
    peer,
    step,
)

ME, A, B, C = map(peer, range(4))
X = message_id(1)


def full_mesh(count: int, seed: int = 1) -> dict[tuple[int, int], float]:
    luck = random.Random(seed)
    return {pair: luck.uniform(0.005, 0.08) for pair in combinations(range(count), 2)}


def fresh(me=ME) -> PushTrees:
    return PushTrees(me, random.Random(1))


def told(state: PushTrees, sender, now: float = 0.0, **lists: list[bytes]) -> list[Push | Tell]:
    return step(state, Told(sender, Ids(**{name: b"".join(ids) for name, ids in lists.items()})), now)


# --- everybody gets everything -----------------------------------------------------------------------


def hostile_node(habits: frozenset[str], luck: random.Random):
    """A neighbour that hears everything, and announces, asks, prunes and repeats as its habits are."""

    def act(sim: Sim, me, event) -> None:
        news = [event.id] if isinstance(event, Arrived | Repeated) else []
        for other in sim.neighbours(me):
            if "honest" in habits:
                for action in step(sim.nodes[me], event, sim.now) if other == sim.neighbours(me)[0] else []:
                    if isinstance(action, Tell):
                        sim.send(me, action)
            if "announces" in habits and news:
                sim.send(me, Tell(other, Ids(have=news[0])))
            if "invents" in habits:
                sim.send(me, Tell(other, Ids(have=luck.randbytes(ID_BYTES * 40))))
            if "prunes" in habits and news:
                sim.send(me, Tell(other, Ids(prune=news[0])))
            if "asks" in habits and isinstance(event, Told):
                sim.send(me, Tell(other, Ids(want=event.ids.have)))
            if "repeats" in habits and news:
                sim.send(me, Push(other, news[0]))
                sim.send(me, Push(other, news[0]))

    return act


HABITS = st.frozensets(st.sampled_from(["announces", "invents", "prunes", "asks", "repeats", "honest"]))


@st.composite
def worlds(draw):
    """Nodes of which number 0 is hostile; the others are connected without it."""
    count = draw(st.integers(3, 10))
    luck = random.Random(draw(st.integers(0, 2**32)))
    pairs = {(luck.randrange(1, number), number) for number in range(2, count)}
    share = draw(st.sampled_from([0.0, 0.3, 1.0]))
    pairs |= {pair for pair in combinations(range(count), 2) if luck.random() < share or pair[0] == 0}
    return {pair: luck.uniform(0.001, 0.3) for pair in pairs}, luck


@settings(deadline=None, max_examples=40)
@given(worlds(), HABITS, st.sampled_from([0.0, 0.05, 0.4]))
def test_every_message_reaches_every_correct_node_whatever_one_neighbour_does(world, habits, loss):
    """Loss is a late part, as on any reliable transport, and the rest of the stream waits behind it."""
    delays, luck = world
    sim = Sim(delays)
    sim.hostile[peer(0)] = hostile_node(habits, luck)
    sim.late = lambda: sum(0.2 for _ in range(5) if luck.random() < loss)
    correct = [name for name in sim.nodes if name != peer(0)]
    for number in range(12):
        author = luck.choice(correct)
        sim.at(luck.choice([0.0, 3.0, 40.0]) + luck.random(), sim.publish, number, author)
    sim.run(200.0)
    for number in range(12):
        missing = set(correct) - sim.arrivals[message_id(number)].keys()
        assert not missing, (number, missing, habits)


def test_connections_that_break_lose_no_message():
    """Each node still has another connection; what was under way on the broken one comes that way."""
    count = 10
    pairs = [(number, (number + hop) % count) for number in range(count) for hop in (1, 2, 3)]
    sim = Sim(dict.fromkeys(pairs, 0.05), seed=2)
    luck = random.Random(3)
    for number in range(60):
        sim.at(0.3 * number, sim.publish, number, peer(luck.randrange(count)))
    for cut in range(9):
        sim.at(2.0 * cut + 0.02, sim.cut, *map(peer, pairs[3 * cut + 1]))
    sim.run(60.0)
    assert [len(found) for found in sim.arrivals.values()] == [count] * 60


# --- few copies, in little time --------------------------------------------------------------------------


@pytest.mark.parametrize("count", [8, 24])
def test_a_message_is_received_twice_once_the_trees_are_known(count):
    sim = Sim(full_mesh(count))
    for number in range(10 * count):
        sim.at(number // count + 0.001 * number, sim.publish, number, peer(number % count))
    sim.run(100.0)
    settled = [sim.copies[message_id(number)] / (count - 1) for number in range(4 * count, 10 * count)]
    assert 1.8 <= sum(settled) / len(settled) <= 2.2
    assert sum(sim.copies.values()) / (10 * count) / (count - 1) <= 2.5 + 6 / 10
    seconds = [max(found.values()) - min(found.values()) for found in sim.arrivals.values()]
    assert max(seconds[4 * count :]) < 0.2


def test_a_sender_that_falls_silent_costs_no_time_and_is_replaced():
    """Two neighbours push each message. One of them stops: the other still pushes, and a third is asked to."""
    sim = Sim(full_mesh(12))
    names = list(sim.nodes)
    for number in range(12 * 5):
        sim.at(float(number // 12), sim.publish, number, names[number % 12])
    sim.run(30.0)
    sim.hostile[names[3]] = lambda sim, me, event: None
    correct = [name for name in names if name != names[3]]
    for number in range(100, 100 + 11 * 4):
        sim.at(30.0 + number // 11, sim.publish, number, correct[number % 11])
    sim.run(100.0)
    whole = [message_id(number) for number in range(100, 144)]
    assert all(set(correct) <= sim.arrivals[name].keys() for name in whole)
    slowest = max(
        max(sim.arrivals[name][node] for node in correct) - min(sim.arrivals[name].values()) for name in whole
    )
    assert slowest < ANNOUNCE_S
    for name in (message_id(number) for number in range(133, 144)):
        senders = [len(sim.nodes[node].known[name].senders) for node in correct if node != sim.author[name]]
        assert senders == [2] * 10


# --- one node's decisions --------------------------------------------------------------------------------


def test_the_first_message_of_an_author_is_pushed_to_few_and_our_own_to_more():
    neighbours = [peer(number) for number in range(40)]
    for author, pushes in ((peer(50), FIRST_PUSHES), (peer(60), OWN_PUSHES)):
        state = fresh(peer(60))
        actions = step(state, Arrived(X, None, author, neighbours), 0.0)
        assert len({action.peer for action in actions}) == len(actions) == pushes
        told_to = step(state, Ticked(), state.due)
        assert {action.ids.have for action in told_to} == {X}
        assert {action.peer for action in (*actions, *told_to)} == set(neighbours)


def test_a_neighbour_that_has_a_message_is_not_told_of_it():
    state = fresh()
    others = [peer(number) for number in range(1, 20)]
    pushed = {action.peer for action in step(state, Arrived(X, A, peer(50), others), 0.0)}
    lazy = [name for name in others if name not in pushed and name != A]
    step(state, Repeated(X, lazy[1]), 0.0)
    told(state, lazy[0], have=[X])
    assert {action.peer for action in step(state, Ticked(), 1.0)} == set(lazy[2:])


def test_the_third_sender_is_pruned_and_then_only_announces():
    state = fresh()
    step(state, Arrived(X, A, peer(50), [A, B, C]), 0.0)
    step(state, Repeated(X, A), 0.0)
    step(state, Repeated(X, B), 0.0)
    assert state.due > 1e9, "two senders are wanted; one that repeats itself counts once"
    step(state, Repeated(X, C), 0.0)
    assert step(state, Ticked(), ANNOUNCE_S) == [Tell(C, Ids(prune=X))]
    other = fresh(C)
    step(other, Arrived(X, A, peer(50), [A, ME]), 0.0)
    told(other, ME, prune=[X])
    assert step(other, Arrived(message_id(2), A, peer(50), [A, ME]), 0.0) == []
    assert step(other, Ticked(), ANNOUNCE_S) == [Tell(ME, Ids(have=message_id(2)))]


def test_an_announced_message_is_asked_for_one_announcer_after_the_other():
    state = fresh()
    for at, name in enumerate((A, B, C)):
        assert told(state, name, 0.01 * at, have=[X]) == []
    assert step(state, Ticked(), WAIT_S - 0.001) == []
    now = WAIT_S
    for name in (A, B, C):
        assert step(state, Ticked(), now) == [Tell(name, Ids(want=X))]
        assert step(state, Ticked(), now + ANSWER_S - 0.001) == []
        now += ANSWER_S
    assert step(state, Ticked(), now) == []
    assert not state.wanted
    assert [state.neighbours[name].strikes for name in (A, B, C)] == [1, 1, 1]


def test_one_that_announces_and_never_sends_is_asked_no_more_until_it_brings_news():
    state, now, asked = fresh(), 0.0, 0
    for number in range(3 * STRIKES):
        told(state, A, now, have=[message_id(number)])
        asked += len(step(state, Ticked(), now + WAIT_S))
        now += WAIT_S + ANSWER_S
        step(state, Ticked(), now)
    assert asked == STRIKES
    told(state, B, now, have=[message_id(100)])
    told(state, A, now, have=[message_id(100)])
    assert step(state, Ticked(), now + WAIT_S) == [Tell(B, Ids(want=message_id(100)))]
    step(state, Arrived(message_id(101), A, peer(50), [A, B]), now)
    told(state, A, now, have=[message_id(102)])
    assert Tell(A, Ids(want=message_id(102))) in step(state, Ticked(), now + 2 * WAIT_S)


def test_a_flood_of_announcements_takes_one_neighbours_share():
    state = fresh()
    for number in range(4):
        told(state, A, have=[message_id(1000 * number + at) for at in range(1, 1000)])
    assert len(state.wanted) == WANTED_OF_ONE
    told(state, B, have=[message_id(9999)])
    asked = {action.peer: action.ids.want for action in step(state, Ticked(), WAIT_S)}
    assert asked[B] == message_id(9999)
    for number in range(20):
        told(
            state,
            peer(10 + number),
            have=[(number << 20 | at).to_bytes(8, "little") for at in range(WANTED_OF_ONE)],
        )
    assert len(state.wanted) <= WANTED


def test_a_message_is_sent_on_request_once_and_only_if_it_was_announced():
    state = fresh()
    step(state, Arrived(X, A, peer(50), [A, B]), 0.0)
    told(state, B, prune=[X])
    second = message_id(2)
    step(state, Arrived(second, A, peer(50), [A, B]), 0.0)
    assert told(state, B, want=[second]) == [], "not announced yet"
    step(state, Ticked(), ANNOUNCE_S)
    assert told(state, C, want=[second]) == []
    assert told(state, B, want=[message_id(77), second, second]) == [Push(B, second)]
    assert told(state, B, want=[second]) == []
    third = message_id(3)
    assert step(state, Arrived(third, A, peer(50), [A, B]), 1.0) == [Push(B, third)], "it is pushed to again"


def test_a_message_that_one_neighbour_alone_pushed_in_time_is_asked_of_an_announcer():
    state = fresh()
    step(state, Arrived(X, A, peer(50), [A, B, C]), 0.0)
    assert told(state, B, have=[X]) == [Tell(B, Ids(want=X))]
    assert told(state, C, have=[X]) == [], "one is enough"
    own = message_id(5)
    step(state, Arrived(own, None, ME, [A, B, C]), 0.0)
    assert told(state, B, have=[own]) == []


def test_one_that_answers_as_late_as_it_may_does_not_stay_the_only_sender():
    state = fresh()
    for name in (A, B):
        told(state, name, have=[X])
    assert step(state, Ticked(), WAIT_S) == [Tell(A, Ids(want=X))]
    late = WAIT_S + ANSWER_S - 0.01
    assert step(state, Arrived(X, A, peer(50), [A, B]), late) == [Tell(B, Ids(want=X))]
    step(state, Repeated(X, B), late)
    assert step(state, Ticked(), late + ANNOUNCE_S) == [], "the second sender is not pruned"


def test_a_slow_neighbour_that_announces_first_delays_one_message():
    """Nobody pushes to number 1: number 0 announces at once and answers late, number 2 is honest and announces."""
    sim = Sim({(0, 1): 0.01, (1, 2): 0.01, (0, 2): 0.01})
    slow, victim, honest = map(peer, range(3))

    def act(sim: Sim, me, event) -> None:
        if isinstance(event, Arrived):
            sim.send(me, Tell(victim, Ids(have=event.id)))
        elif isinstance(event, Told) and event.ids.want:
            sim.at(sim.now + ANSWER_S - 0.1, sim.send, me, Push(victim, event.ids.want))

    sim.hostile[slow] = act
    sim.publish(0, honest)
    sim.at(0.5, sim.event, honest, Told(victim, Ids(prune=message_id(0))))
    for number in range(1, 5):
        sim.at(10.0 * number, sim.publish, number, honest)
    sim.run(60.0)
    took = [sim.arrivals[message_id(number)][victim] - 10.0 * number for number in range(1, 5)]
    assert took[0] > ANSWER_S
    assert max(took[1:]) < 0.02


def test_a_lost_neighbour_leaves_nothing_and_is_pushed_to_when_it_is_back():
    state = fresh()
    step(state, Arrived(X, A, peer(50), [A, B]), 0.0)
    told(state, B, prune=[X], have=[message_id(9)])
    step(state, Lost(B), 0.0)
    assert B not in state.neighbours
    assert step(state, Ticked(), WAIT_S) == [], "nobody is left to be asked"
    assert step(state, Arrived(message_id(2), A, peer(50), [A, B]), 1.0) == [Push(B, message_id(2))]


def test_what_is_forgotten_is_not_offered_any_more(monkeypatch):
    monkeypatch.setattr(push_trees, "KNOWN_S", 10.0)
    state = fresh()
    state.lazy[ME] = {A}
    for number in range(40):
        step(state, Arrived(message_id(number), None, ME, [A]), float(number))
        step(state, Ticked(), number + ANNOUNCE_S)
    assert {*state.neighbours[A].offered} == {*state.known} == {message_id(number) for number in range(29, 40)}


NAMES = st.sampled_from([peer(number) for number in range(1, 6)])
SOME_IDS = st.lists(st.integers(0, 40).map(message_id), max_size=8).map(b"".join)
EVENTS = st.one_of(
    st.builds(Arrived, st.integers(0, 40).map(message_id), NAMES | st.none(), NAMES | st.none(), st.sets(NAMES)),
    st.builds(Told, NAMES, st.builds(Ids, have=SOME_IDS, want=SOME_IDS, prune=SOME_IDS)),
    st.builds(Lost, NAMES),
    st.just(Ticked()),
)


@given(st.lists(st.tuples(EVENTS, st.floats(0, 3)), min_size=20, max_size=60))
def test_whatever_happens_the_state_is_bounded_and_nothing_is_sent_that_is_not_known(events):
    state, now = fresh(), 0.0
    limits = {"KNOWN": 12, "AUTHORS": 3, "IDS_MAX": 6, "WANTED": 10, "WANTED_OF_ONE": 4, "ANNOUNCERS": 2}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in limits.items():
            patch.setattr(push_trees, name, value)
        for event, pause in events:
            now += pause
            seen = {*state.known, *([event.id] if isinstance(event, Arrived) else [])}
            if isinstance(event, Arrived) and event.id in state.known and event.sender is not None:
                event = Repeated(event.id, event.sender)
            for action in step(state, event, now):
                if isinstance(action, Push):
                    assert action.id in seen or action.id not in state.known
            assert len(state.known) <= 12
            assert len(state.lazy) <= 3
            assert len(state.wanted) <= 10
            for wanted in state.wanted.values():
                assert len(wanted.announcers) <= 2
            for each in state.neighbours.values():
                assert max(len(each.have), len(each.prune), len(each.offered)) <= 6
                assert 0 <= each.wanted <= 4
            assert state.due >= now or isinstance(event, Arrived | Told | Lost | Repeated)


# --- bytes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lists",
    [
        (bytes(7), b"", b""),
        (b"", bytes(9), b""),
        (b"", b"", bytes(ID_BYTES * IDS_MAX + ID_BYTES)),
        (b"",),
        ("", b"", b""),
    ],
)
def test_lists_with_parts_of_ids_or_too_many_are_refused(lists):
    with pytest.raises(DecodeError):
        codec.decode(codec.encode(lists), Ids)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_notice_or_a_decode_error(data):
    try:
        ids = codec.decode(data, Ids)
    except DecodeError:
        return
    assert codec.encode(ids) == data


def test_the_limits_of_a_node_fit_its_memory():
    assert KNOWN <= 1 << 14
    assert AUTHORS <= 1000
    assert ANNOUNCERS >= 2, "one of them may be hostile"
