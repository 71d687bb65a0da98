"""Whole nodes that share the experts of a mixture: who trains what, through death, return and late comers."""

import asyncio

import pytest

from atoll.node.daemon.rounds.queries import MORE_ROOM, reason
from atoll.node.daemon.rounds.state import Phase
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.ledger.records import Contribution, PartContribution, experts_of
from atoll.protocols.run.experts import experts_in
from tests.node.virtual.conftest import EXPERTS

ALL = frozenset(range(EXPERTS))


def owned(world, number, at):
    """What a node trained in a round."""
    return experts_in(world.nodes[number].worker.owned[at], EXPERTS)


def is_partition(sets):
    return sum(map(len, sets)) == EXPERTS and frozenset().union(*sets) == ALL


def last_round(world, number):
    return max(world.nodes[number].worker.owned)


@pytest.mark.parametrize("overlap_steps", [0, 10])
def test_each_expert_is_trained_by_one_of_four_and_shares_are_even(world, overlap_steps):
    async def story() -> None:
        async with world(6, 4, holders=1, overlap_steps=overlap_steps) as w:
            for number in range(4):
                w.start(number)
            await w.until(w.all_final)
            w.check_agreement()
            await w.check_feeds()
            for at in range(1, 6):
                sets = [owned(w, number, at) for number in range(4)]
                assert is_partition(sets)
                assert {len(one) for one in sets} == {2}
            assert all(owned(w, n, 1) == owned(w, n, 5) for n in range(4)), "nobody changes without a reason"

    run_virtual(story())


def test_what_a_contribution_covers_is_in_its_record(world):
    async def story() -> None:
        async with world(3, 4, holders=1) as w:
            for number in range(4):
                w.start(number)
            await w.until(w.all_final)
            said = {
                (entry.author, entry.body.round): experts_in(experts_of(entry.body), EXPERTS)
                for _, entry in w.nodes[0].swarm.ledger.since(0, 1 << 20)
                if isinstance(entry.body, Contribution)
            }
            assert said == {(w.nodes[n].peer, at): owned(w, n, at) for n in range(4) for at in range(3)}

    run_virtual(story())


def test_one_dies_for_good_and_only_its_experts_move(world):
    async def story() -> None:
        async with world(14, 4, holders=1) as w:
            for number in range(4):
                w.start(number)
            await w.until(lambda: w.newest() >= 4)
            before = {number: owned(w, number, 3) for number in range(4)}
            await w.kill(2)
            took_s = await w.until(w.all_final)
            assert took_s < 11 * 10.0 * 1.3 + 2 * 20.0, "its lease is waited for, nothing else"
            w.check_agreement()
            after = {number: owned(w, number, 13) for number in (0, 1, 3)}
            assert is_partition(list(after.values()))
            assert all(before[number] <= after[number] for number in after)
            assert set().union(*(after[number] - before[number] for number in after)) == before[2]

    run_virtual(story())


@pytest.mark.slow(
    slice=(
        "test_one_dies_for_good_and_only_its_experts_move, "
        "tests/e2e/test_checkpoint.py::test_two_nodes_save_and_three_go_on"
    )
)
def test_who_comes_back_gets_its_share_again_and_who_comes_late_too(world):
    async def story() -> None:
        async with world(30, 4, holders=1) as w:
            for number in range(4):
                w.start(number)
            await w.until(lambda: w.newest() >= 3)
            await w.kill(1)
            await w.until(lambda: w.newest() >= 9)
            assert len(owned(w, 0, last_round(w, 0))) >= 2
            w.start(1)
            w.start(4)
            await w.until(w.all_final)
            w.check_agreement()
            await w.check_feeds()
            sets = [owned(w, number, 29) for number in range(5)]
            assert is_partition(sets)
            assert {len(one) for one in sets} == {1, 2}

    run_virtual(story())


@pytest.mark.parametrize(("holders", "each"), [(2, 4), (4, 8), (9, 8)])
def test_several_holders(world, holders, each):
    async def story() -> None:
        async with world(4, 4, holders=holders) as w:
            for number in range(4):
                w.start(number)
            await w.until(w.all_final)
            w.check_agreement()
            for at in (1, 3):
                sets = [owned(w, number, at) for number in range(4)]
                assert {len(one) for one in sets} == {each}
                assert all(sum(e in one for one in sets) == min(holders, 4) for e in ALL)

    run_virtual(story())


def test_members_without_room_for_the_model_wait_and_say_so_until_one_more_comes(world):
    async def story() -> None:
        async with world(3, 2, holders=1, room=3) as w:
            for number in range(2):
                w.start(number)
            await asyncio.sleep(60.0)
            for number in range(2):
                driver = w.nodes[number].driver
                assert driver.round.phase is Phase.GATHER
                assert "room for 6 experts; 8 with 1 holders" in reason(driver.round)
                assert reason(driver.round).endswith(MORE_ROOM), "and what helps"
            w.start(2)
            await w.until(w.all_final)
            assert is_partition([owned(w, number, 2) for number in range(3)])

    run_virtual(story())


def test_who_has_room_for_no_expert_trains_what_all_train(world):
    async def story() -> None:
        async with world(4, 3, holders=1, room=0) as w:
            w.start(0)
            await w.until(lambda: w.nodes[0].driver is not None)
            w.room = None
            w.start(1)
            w.start(2)
            await w.until(w.all_final)
            w.check_agreement()
            sets = [owned(w, number, 3) for number in range(3)]
            assert sorted(map(len, sets)) == [0, 4, 4]
            assert not sets[0]
            assert is_partition(sets)

    run_virtual(story())


@pytest.mark.usefixtures("asked_for")
def test_a_liar_about_what_it_covers_stops_nobody(world):
    """Node 3 says that node 0's payload covers something else, or what does not exist: it never counts."""

    async def story() -> None:
        async with world(6, 3, holders=1) as w:
            for number in range(3):
                w.start(number)
            await w.until(lambda: bool(w.nodes[0].worker.pending))
            payload = w.nodes[0].worker.pending[0]
            liar = w.start(3)
            await w.until(
                lambda: liar.swarm is not None and liar.driver is not None and liar.driver.finalizer.is_synced
            )
            for experts in (b"\x01", b"\x00\x00", b"\xff"):
                facts = (payload.round, payload.base, payload.payload, 1, 16, 64, 1.0)
                liar.swarm.publish(PartContribution(*facts, experts))
            await w.until(w.all_final)
            w.check_agreement()
            rows = w.nodes[0].driver.context.log.rows
            assert w.nodes[3].peer not in rows[payload.round].contributors
            assert all(w.nodes[0].peer in rows[at].contributors for at in range(6))

    run_virtual(story())
