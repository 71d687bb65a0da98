"""Whole nodes: a slow member whose links flap is left out no more often for what rounds know of lost members."""

import asyncio

import pytest

from atoll.node.daemon.rounds import machine, queries
from atoll.node.daemon.rounds.state import LOST_ROUNDS
from atoll.p2p.transports.memory.virtual_time import run_virtual
from tests.node.virtual.test_virtual_goodput import PACE

NODES, SLOW, ROUND_S, SLOW_S = 5, 4, 10.0, 13.0
"""The slow member's work comes after the others', and within their grace."""
CUT_S, WHOLE_S, MINUTES = 4.0, 9.0, 3


def rounds_with_it(world):
    """In how many final sets the slow member is, and how many there are, in some minutes."""

    async def story():
        async with world(4000, NODES, **PACE) as w:
            w.network.silence_s = 2.0
            for number in range(NODES):
                w.start(number, SLOW_S if number == SLOW else ROUND_S)
            await w.until(lambda: w.all_final(3))
            slow, loop, first = w.nodes[SLOW], asyncio.get_running_loop(), w.newest()
            others = [w.nodes[number].peer for number in range(SLOW)]
            end = loop.time() + 60 * MINUTES
            while loop.time() < end:
                w.network.cut([slow.peer], others)
                await asyncio.sleep(CUT_S)
                w.network.heal()
                await asyncio.sleep(WHOLE_S)
            last = w.newest()
            await w.until(lambda: w.all_final(last))
            w.check_agreement()
            rows = w.nodes[0].driver.context.log.rows
            found = [rows[number].contributors for number in range(first + 1, last + 1) if rows[number].final]
            return sum(slow.peer in authors for authors in found), len(found)

    return run_virtual(story())


@pytest.mark.slow(
    slice="tests/node/virtual/test_virtual_slow.py::test_a_member_thirty_times_slower_is_in_the_final_sets_and_holds_nobody_up"
)
def test_a_slow_member_behind_flapping_links_is_left_out_no_more_often(world, monkeypatch):
    now, rounds = rounds_with_it(world)
    monkeypatch.setattr(queries, "UNREACHABLE_ROUNDS", LOST_ROUNDS)
    monkeypatch.setattr(machine, "comes_too_late", lambda state, number: False)
    before, rounds_before = rounds_with_it(world)
    assert rounds >= rounds_before > 8
    assert now >= before > 3
