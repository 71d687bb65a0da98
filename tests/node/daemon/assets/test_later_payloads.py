"""Which payloads of old rounds a node that comes late does not fetch yet."""

import asyncio
from types import SimpleNamespace

import pytest

from atoll.node.daemon.assets.later_payloads import LOOK_S, LOOKS, LaterPayloads
from atoll.node.daemon.coordinator.finalizer import SNAPSHOT_EVERY
from atoll.p2p.transports.memory.virtual_time import run_virtual

LEASE_S = 60.0


class Late:
    """A node that began at 100 s, with what it knows."""

    def __init__(self, newest=-1, applied=-1, leases=(), voters=()):
        self.now = 100.0
        self.machines = SimpleNamespace(
            finality=SimpleNamespace(last_final=newest, voters=voters), round=SimpleNamespace(final=applied)
        )
        self.leases = {number: (SimpleNamespace(final=final), 9.0) for number, final in enumerate(leases)}
        spec = SimpleNamespace(pace=SimpleNamespace(lease_s=LEASE_S))
        self.looks = 0
        self.group = None
        self.rule = LaterPayloads(
            context=SimpleNamespace(now=lambda: self.now, spec=spec),
            start_task=lambda work, name: self.group.create_task(work, name=name),
            leases=self.read_leases,
            machines=self.machines,
        )

    def read_leases(self):
        self.looks += 1
        return self.leases

    def waiting(self):
        """The rounds whose payloads wait."""
        return [*self.rule.waiting()]


def test_final_rounds_wait_but_for_the_next_to_apply():
    """A snapshot stands for them. Without one they are applied in turn, so the next one never waits."""
    late = Late(newest=100)
    assert late.waiting() == [*range(1, 101)]
    late.machines.round.final = 40
    assert [number for number in late.waiting() if number > 40] == [*range(42, 101)]


@pytest.mark.parametrize("behind", range(SNAPSHOT_EVERY + 2))
def test_who_is_near_fetches_all_at_once(behind):
    assert Late(newest=100, applied=100 - behind).waiting() == []


def test_what_most_others_call_final_waits_for_one_lease_and_no_longer():
    late = Late(leases=(100, 100, 7, 100))
    assert late.waiting() == [*range(1, 101)]
    late.now += LEASE_S
    assert late.waiting() == [], "they lied: the rounds are open here"


def test_a_minority_of_lies_or_nobody_delays_nothing():
    assert Late(leases=(10**9, 10**9, -1, -1, 3)).waiting() == []
    assert Late().waiting() == []


def test_strangers_delay_and_hurry_nothing_where_a_voter_is_here():
    strangers = (1000,) * 5
    assert Late(leases=(3, *strangers), voters={0}).waiting() == []
    assert Late(leases=(100, -1, -1, -1), voters={0}).waiting() == [*range(1, 101)]
    assert Late(leases=(100, 100, 7), voters={"away"}).waiting() == [*range(1, 101)], "no voter is here"


def test_all_payloads_that_wait_are_one_question_and_end_with_their_round():
    """Thousands of them wait while a node catches up: each that asked for itself took a share of a core."""
    began = []

    async def payload(late, number):
        while (end := late.rule(number)) is not None:
            await end.wait()
        began.append(number)

    async def story():
        late = Late(newest=40)
        async with asyncio.TaskGroup() as late.group:
            for number in range(1, 41):
                for _ in range(5):
                    late.group.create_task(payload(late, number))
            await asyncio.sleep(0)
            late.looks = 0
            await asyncio.sleep(60.0)
            assert 0 < late.looks <= 60.0 / LOOK_S
            assert began == []
            late.machines.round.final = 3
            await asyncio.sleep(LOOK_S)
            assert sorted(began) == sorted([*range(1, 5)] * 5), "round 4 is the next to apply"
            assert late.rule(4) is None
            late.machines.round.final = 40
        assert len(began) == 200, "and no task is left"

    run_virtual(story())


def test_who_waits_asks_again_once_in_a_while_so_that_what_nobody_wants_ends():
    async def story():
        late = Late(newest=40)
        async with asyncio.TaskGroup() as late.group:
            end = late.rule(9)
            await asyncio.sleep(LOOKS * LOOK_S - 0.1)
            assert not end.is_set()
            await asyncio.sleep(0.2)
            assert end.is_set()
            assert not late.rule(9).is_set(), "the round waits"
            late.machines.round.final = 40

    run_virtual(story())
