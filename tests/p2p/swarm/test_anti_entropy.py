"""Who is abreast of its neighbours: after an exchange with each, but one that never answers is given up."""

import asyncio
import random
from itertools import pairwise
from types import MappingProxyType

import pytest

from atoll.p2p.swarm.anti_entropy import ANSWER_S, EVERY_S, EXCHANGE_S, LEAST_PACE, SLOW_S, AntiEntropy
from atoll.p2p.swarm.exchange_turns import AT_ONCE, RETRIES, WAIT_S, ExchangeTurns
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.errors import DecodeError, PeerFault, Unreachable
from atoll.protocols.ids import PeerId

QUICK, SLOW, DUMB, CROSS, BABBLING = map(PeerId, ("quick", "slow", "dumb", "cross", "babbling"))
FAULTS = {DUMB: Unreachable("nothing comes"), CROSS: PeerFault("it complains"), BABBLING: DecodeError("junk")}


class Exchanges:
    wanted = covered = MappingProxyType({})

    async def exchange(self, peer):
        if peer in FAULTS:
            raise FAULTS[peer]
        await asyncio.sleep(8.0 if peer == SLOW else 0.1)

    async def pull(self, peer):
        pass

    async def fetch(self, peer):
        return 0


def make(exchanges, neighbours, is_accepted=lambda peer: False):
    return AntiEntropy(
        ledger=exchanges,
        orphans=exchanges,
        registers=exchanges,
        neighbours=neighbours,
        is_accepted=is_accepted,
        rng=random.Random(1),
        on_fault=lambda *_: None,
        on_local_fault=lambda _: None,
    )


async def abreast_after_s(neighbours):
    now = asyncio.get_running_loop().time
    exchanges = Exchanges()
    repair = make(exchanges, lambda: neighbours)
    began = now()
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(repair.serve())
        for peer in neighbours:
            repair.ask(peer)
        for _ in range(2000):
            if repair.is_caught_up():
                break
            await asyncio.sleep(0.05)
        serving.cancel()
    return now() - began


def test_every_neighbour_that_answers_is_waited_for():
    assert run_virtual(abreast_after_s([QUICK])) < 1
    assert 8 <= run_virtual(abreast_after_s([QUICK, SLOW])) < 9


def test_one_that_breaks_the_protocol_is_not_waited_for_and_is_not_enough():
    for peer in (CROSS, BABBLING):
        assert run_virtual(abreast_after_s([QUICK, peer])) < 1
        assert run_virtual(abreast_after_s([peer])) > 99


def test_who_left_and_came_back_is_asked_again():
    async def story():
        here, exchanges = [QUICK], Exchanges()
        repair = make(exchanges, lambda: here)
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(repair.serve())
            repair.ask(QUICK)
            await asyncio.sleep(1)
            assert repair.is_caught_up()
            here.clear()
            await asyncio.sleep(2)
            here.append(QUICK)
            assert not repair.is_caught_up()
            repair.ask(QUICK)
            await asyncio.sleep(1)
            assert repair.is_caught_up()
            serving.cancel()

    run_virtual(story())


def test_one_that_never_answers_is_given_up_and_is_not_enough():
    assert 1 < run_virtual(abreast_after_s([QUICK, DUMB])) < 15
    assert run_virtual(abreast_after_s([DUMB])) > 99
    assert run_virtual(abreast_after_s([])) > 99


MEMBERS = tuple(PeerId(f"member {number}") for number in range(2))


class Strangers:
    """Members answer at once, and strangers never, or after each part of `part_s` seconds one more."""

    wanted = covered = MappingProxyType({})

    def __init__(self, here, part_s=1e9, part_bytes=100):
        self.here, self._part_s, self._part_bytes, self.repair, self.whole = here, part_s, part_bytes, None, []

    async def pull(self, peer):
        while peer not in MEMBERS:
            await asyncio.sleep(self._part_s)
            self.repair.heard(peer, self._part_bytes)

    async def exchange(self, peer):
        self.whole.append(asyncio.get_running_loop().time())

    async def fetch(self, peer):
        return 0

    async def come_and_go(self, again_s):
        number = 0
        while True:
            await asyncio.sleep(again_s)
            for peer in [peer for peer in self.here if peer not in MEMBERS]:
                self.here.remove(peer)
                await asyncio.sleep(1.5)
                number += 1
                self.here.append(PeerId(f"{peer[:20]} {number}"))
                self.repair.ask(self.here[-1])


@pytest.mark.parametrize(("count", "again_s"), [(8, 1e9), (16, 200.0), (64, 100.0)])
@pytest.mark.parametrize("part_s", [1e9, 1.0])
def test_strangers_that_are_silent_or_slow_keep_no_member_waiting(count, again_s, part_s):
    async def story():
        here = [*MEMBERS, *(PeerId(f"stranger {number:03}") for number in range(count))]
        exchanges = Strangers(here, part_s)
        exchanges.repair = repair = make(exchanges, lambda: here, lambda peer: peer in MEMBERS)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(repair.serve()), group.create_task(exchanges.come_and_go(again_s))]
            for peer in reversed(here):
                repair.ask(peer)
            await asyncio.sleep(600)
            for task in tasks:
                task.cancel()
        return exchanges.whole

    times = run_virtual(story())
    assert max(b - a for a, b in pairwise([0.0, *times, 600.0])) <= 1.5 * EVERY_S + 2.0


@pytest.mark.parametrize("part_s", [1e9, 1.0])
def test_a_newcomer_is_held_by_no_silent_peer_for_long(part_s):
    async def story():
        here = [*(PeerId(f"stranger {number}") for number in range(16)), MEMBERS[0]]
        exchanges = Strangers(here, part_s)
        exchanges.repair = repair = make(exchanges, lambda: here)
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(repair.serve())
            for peer in here:
                repair.ask(peer)
            async with asyncio.timeout(1000):
                await repair.synced.wait()
            serving.cancel()
        return asyncio.get_running_loop().time()

    # Silent ones hold four places for 10 s each, and so do those that bring little: one of these ends in a second.
    assert run_virtual(story()) <= 16 / AT_ONCE * max(ANSWER_S, SLOW_S) + (1 if part_s > ANSWER_S else 6)


class OnePace:
    """Peers bring a part each second without end, SLOW one of `part_bytes`; when each ended first."""

    wanted = covered = MappingProxyType({})

    def __init__(self, part_bytes):
        self._part_bytes, self.repair, self.ended = part_bytes, None, {}

    async def pull(self, peer):
        now = asyncio.get_running_loop().time
        try:
            while peer != QUICK:
                await asyncio.sleep(1.0)
                self.repair.heard(peer, self._part_bytes if peer == SLOW else 2 * LEAST_PACE)
        finally:
            self.ended.setdefault(peer, now())

    async def exchange(self, peer):
        pass

    async def fetch(self, peer):
        return 0


@pytest.mark.parametrize(
    ("part_bytes", "is_waited_for", "failures", "are_members", "ends_s"),
    [
        (100, True, 0, False, SLOW_S),
        (LEAST_PACE // 2, True, 0, False, SLOW_S),
        (2 * LEAST_PACE, True, 0, False, EXCHANGE_S),
        (100, False, 0, False, EXCHANGE_S),
        (100, True, 1, False, EXCHANGE_S),
        (100, True, 0, True, EXCHANGE_S),
    ],
)
def test_a_slow_exchange_gives_its_place_to_a_peer_that_waits(
    part_bytes, is_waited_for, failures, are_members, ends_s
):
    """Not to one that failed more often; and who is a member, or brings enough, goes on."""

    async def story():
        here = [SLOW, *(PeerId(f"peer {number}") for number in range(AT_ONCE - 1)), QUICK]
        exchanges = OnePace(part_bytes)
        exchanges.repair = repair = make(exchanges, lambda: here, lambda peer: are_members)
        for _ in range(failures):
            repair._turns.note_failed(QUICK, 0.0)
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(repair.serve())
            for peer in here if is_waited_for else here[:-1]:
                repair.ask(peer)
            if not is_waited_for:
                here.remove(QUICK)
            await asyncio.sleep(EXCHANGE_S + 1.0)
            serving.cancel()
        return exchanges.ended

    ended = run_virtual(story())
    assert ends_s <= ended[SLOW] < ends_s + 2.0
    if ends_s < EXCHANGE_S:
        assert ended[QUICK] == ended[SLOW], "its place is free at once"
        assert ended[PeerId("peer 0")] >= EXCHANGE_S


def test_turns_keep_two_places_for_members_and_remember_who_failed():
    a, b, *strangers = here = [PeerId(name) for name in ("a", "b", "w", "x", "y", "z")]
    turns = ExchangeTurns(lambda peer: peer in (a, b))
    for peer in reversed(here):
        turns.ask(peer)
    assert turns.take(here, 0.0) == b
    assert [turns.take(here, WAIT_S) for _ in range(4)] == [a, strangers[3], strangers[2], None]
    turns.end(a)
    assert turns.take(here, 99.0) is None, "what is left is for members"
    turns.ask(a)
    assert turns.take(here, 90.0) is None, "b is asked"
    assert turns.take(here, 99.0) == a
    turns.note_failed(a, 0.0)
    turns.end(a)
    turns.ask(a)
    assert turns.take(here, 110.0) is None
    assert turns.take(here, 120.0) is None, "one that failed is like a stranger"
    turns.end(strangers[3])
    assert turns.take(here, 120.0) == a, "but goes before them"
    turns.end(a)
    turns.note_failed(strangers[1], 0.0)
    turns.ask(strangers[3])
    assert turns.take(here, 120.0) == strangers[0], "who did not fail is next, then the older question"
    assert turns.to_retry(here, 100.0) == [a, strangers[1]]
    assert turns.to_retry([a], 399.0) == [a]
    assert turns.failures(strangers[1]) == 1, "it dials anew"
    assert turns.to_retry([a], 401.0) == [a]
    assert turns.failures(strangers[1]) == 0
    for number in range(5000):
        turns.note_failed(PeerId(str(number)), 0.0)
    assert len(turns._failed) == 1024


def test_members_that_fail_again_and_again_leave_strangers_their_turns():
    a, b, stranger = here = [PeerId(name) for name in "abx"]
    turns = ExchangeTurns(lambda peer: peer != stranger)
    for peer in (a, b):
        turns.note_failed(peer, 0.0, RETRIES + 1)
    for peer in here:
        turns.ask(peer)
    assert turns.take(here, 99.0) == stranger
    assert turns.take(here, 99.0) == a


def test_a_peer_waits_shortly_while_a_member_that_answers_is_asked():
    a, b, stranger = here = [PeerId(name) for name in "abx"]
    turns = ExchangeTurns(lambda peer: peer != stranger)
    for peer in here:
        turns.ask(peer)
    assert turns.take(here, 10.0) == a
    assert turns.take(here, 10.0 + WAIT_S - 0.1) is None
    turns.ask(b)
    assert turns.take(here, 10.0 + WAIT_S) == b, "a question that is repeated does not begin to wait anew"
    turns.end(b)
    turns.ask(b)
    assert turns.take(here, 20.0) == stranger
    assert turns.take(here, 20.0) is None
    turns.note_failed(a, 20.0)
    assert turns.take(here, 20.0) == b, "nobody waits for who failed, or for a stranger"


def test_who_knows_no_member_waits_for_nobody():
    here = [PeerId(name) for name in "abx"]
    turns = ExchangeTurns(lambda peer: False)
    for peer in here:
        turns.ask(peer)
    assert [turns.take(here, 0.0) for _ in here] == here


class Members:
    """Members that answer after so many seconds each, and when each was asked first."""

    wanted = covered = MappingProxyType({})

    def __init__(self, takes_s):
        self.takes_s, self.asked = takes_s, {}

    async def pull(self, peer):
        self.asked.setdefault(peer, asyncio.get_running_loop().time())
        await asyncio.sleep(self.takes_s[peer])

    async def exchange(self, peer):
        pass

    async def fetch(self, peer):
        return 0


@pytest.mark.parametrize(("first_s", "least_s", "most_s"), [(1.0, 1.0, 1.0), (1e9, WAIT_S, WAIT_S + 1.5)])
def test_members_are_asked_in_turn_and_a_silent_one_keeps_the_next_for_seconds(first_s, least_s, most_s):
    async def story():
        exchanges = Members(dict(zip(MEMBERS, (first_s, 0.1), strict=True)))
        repair = make(exchanges, lambda: MEMBERS, lambda peer: True)
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(repair.serve())
            for peer in MEMBERS:
                repair.ask(peer)
            await asyncio.sleep(WAIT_S + 3.0)
            serving.cancel()
        return exchanges.asked

    asked = run_virtual(story())
    assert asked[MEMBERS[0]] == 0.0
    assert least_s <= asked[MEMBERS[1]] <= most_s
