"""What kills cost the protocol: whole nodes on virtual time, each on a machine of its own, with the presets' pace.

Goodput is the tokens in final sets, over those of an undisturbed swarm in the same time.
"""

import asyncio
import random

import pytest

from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.ledger.records import Contribution

PACE = {"lease_s": 60.0, "quorum_256": 192, "grace_256": 128, "least_256": 64}
"""The presets'."""
NODES = 8
ROUND_S = 2.0
"""About what `tiny` takes on a quiet core. Longer rounds lose more to a kill: what was trained of the round."""
DOWN_S = 8.0
"""From SIGKILL until the worker of the next start is there: what a quiet machine needs."""
BARS = {60.0: 0.95, 15.0: 0.80, 5.0: 0.80}
LONG = {"round_s": 10.0}
OVERLAPPED = {**LONG, "overlap_steps": 4}
"""A fifth of a round; the presets overlap a seventh to a half."""
FOUR_LEAST = 0.7
"""Of four nodes at a kill in 15 s, each of which is down for 8 s of every 60: a guard of the pace, no bar."""


async def tokens(w, nodes, seconds, every_s, seed=1, round_s=ROUND_S):
    """Tokens of the rounds that begin in so many seconds, after all nodes trained together."""
    for number in range(nodes):
        w.start(number, round_s)
    await w.until(lambda: w.all_final(3))
    loop, rng, first = asyncio.get_running_loop(), random.Random(f"goodput {seed}"), w.newest()
    end = loop.time() + seconds
    async with asyncio.TaskGroup() as group:
        while every_s and loop.time() + every_s < end:
            await asyncio.sleep(every_s)
            up = [number for number in range(nodes) if w.nodes[number].task is not None]
            if up:
                group.create_task(die(w, rng.choice(up)))
        await asyncio.sleep(max(0.0, end - loop.time()))
        last = w.newest()
    await w.until(lambda: w.all_final(last + 1))
    w.check_agreement()
    await w.check_feeds()
    said, final = {}, {}
    for _, entry in w.nodes[0].swarm.ledger.since(0, 1 << 20):
        if isinstance(entry.body, Contribution):
            said[entry.author, entry.body.round] = entry.body.tokens
    for row in w.nodes[0].driver.context.log.rows.values():
        final[row.round] = row.contributors
    return sum(said.get((author, at), 0) for at in range(first + 1, last + 1) for author in final.get(at, ()))


async def die(w, number):
    await w.kill(number)
    await asyncio.sleep(DOWN_S)
    w.start(number)


def ratio(world, nodes, seconds, every_s, capsys, round_s=ROUND_S, **more):
    async def story(every_s):
        async with world(4000, nodes, **PACE, **more) as w:
            return await tokens(w, nodes, seconds, every_s, round_s=round_s)

    still, stormy = run_virtual(story(0.0)), run_virtual(story(every_s))
    with capsys.disabled():
        how = f"{nodes} nodes, rounds of {round_s:.0f} s{f' {more}' * bool(more)}, {seconds / 60:.0f} virtual min"
        print(f"\none kill in {every_s:.0f} s, {how}: {stormy / still:.3f}")
    return stormy / still


def test_four_nodes_keep_most_of_their_goodput_at_a_kill_in_15_s(world, capsys):
    assert ratio(world, 4, 120.0, 15.0, capsys) >= FOUR_LEAST


@pytest.mark.measure
@pytest.mark.parametrize("every_s", BARS)
@pytest.mark.parametrize("more", [{}, LONG, OVERLAPPED], ids=["short", "long", "overlapped"])
def test_goodput_of_20_minutes(world, every_s, more, capsys):
    assert ratio(world, NODES, 1200.0, every_s, capsys, **more) >= BARS[every_s]
