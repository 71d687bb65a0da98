"""Whole nodes of speeds 8, 4, 2 and 1, and one 30 times slower than the fastest: who is in the sets, who waits."""

import asyncio
from typing import NamedTuple

import msgspec
import pytest

from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.ledger.records import Contribution
from tests.node.virtual.conftest import CONTEXT, STEPS

FAST_S, BATCH = 10.0, 32
UNEVEN_S = [FAST_S, 2 * FAST_S, 4 * FAST_S, 8 * FAST_S, 30 * FAST_S]
"""Seconds that a round's nominal steps take each member."""
SLOW_MOST_S = [FAST_S, 8 * FAST_S, 8 * FAST_S, 8 * FAST_S]
ROUNDS = 30
WARM = 40
"""Rounds before those that are looked at: the slowest takes as long as 30 of them for its first one."""
SHORT = 6
"""As WARM where no member is so slow: speeds are not known in the first rounds."""
FIXED, MEDIAN, GROUP = {}, {"least_256": 64}, {"least_256": 64, "arrival": "group"}
RULES = {
    "fixed H": FIXED,
    "median": MEDIAN,
    "median, most 1024": {**MEDIAN, "most_256": 1024},
    "group": GROUP,
    "group, most 1024": {**GROUP, "most_256": 1024},
}


class Ran(NamedTuple):
    """By member, of the rounds that were looked at; see `ran`."""

    in_sets: list[float]
    """Share of the final sets that have its work."""
    idle: list[float]
    """Share of the time in which it did not train."""
    round_s: float
    tokens_per_s: float
    """Of all that is in the sets, over what all could do that never wait."""

    def __str__(self) -> str:
        shares, idle = (" ".join(f"{each:.2f}" for each in found) for found in (self.in_sets, self.idle))
        return (
            f"in sets {shares}; idle {idle}; {self.round_s:.1f} s a round; {self.tokens_per_s:.2f} of all tokens"
        )


def large_steps(spec):
    return msgspec.structs.replace(spec, inner=msgspec.structs.replace(spec.inner, batch=BATCH))


def ran(world, times_s, warm=WARM, rounds=ROUNDS, **pace) -> Ran:
    async def story():
        async with world(4000, len(times_s), adjust=large_steps, **pace) as w:
            for number, train_s in enumerate(times_s):
                w.start(number, train_s=train_s)
            await w.until(lambda: w.nodes[0].worker.final >= warm, limit_s=40_000.0)
            loop, first, nodes = asyncio.get_running_loop(), w.newest(), w.nodes
            began_s, busy_s = loop.time(), [nodes[number].worker.busy_s for number in range(len(times_s))]
            await w.until(lambda: w.newest() >= first + rounds, limit_s=400_000.0, look_s=0.1)
            took_s = loop.time() - began_s
            worked_s = [nodes[at].worker.busy_s - before for at, before in enumerate(busy_s)]
            await w.until(lambda: nodes[0].worker.final >= first + rounds, limit_s=40_000.0)
            w.check_agreement()
            await w.check_feeds()
            counted = range(first, first + rounds)
            rows = {row.round: row.contributors for row in nodes[0].driver.context.log.rows.values()}
            said = {}
            for _, entry in nodes[0].swarm.ledger.since(0, 1 << 20):
                if isinstance(entry.body, Contribution):
                    said[entry.author, entry.body.round] = entry.body.tokens
            peers = [nodes[number].peer for number in range(len(times_s))]
            tokens = sum(said[peer, at] for at in counted for peer in rows[at])
            most = sum(STEPS * BATCH * CONTEXT / each for each in times_s)
            return Ran(
                [sum(peer in rows[at] for at in counted) / rounds for peer in peers],
                # A step may end after the last look.
                [max(0.0, 1 - worked / took_s) for worked in worked_s],
                took_s / rounds,
                tokens / took_s / most,
            )

    return run_virtual(story())


def say(capsys, name: str, found: Ran) -> None:
    with capsys.disabled():
        print(f"\n{name}: {found}")


def test_a_group_arrives_together_and_the_slowest_is_in_it(world, capsys):
    found = ran(world, UNEVEN_S, rounds=15, **GROUP)
    say(capsys, "group", found)
    assert min(found.in_sets) >= 0.9
    assert max(found.idle[:3]) <= 0.15, "the fast do not wait"
    assert found.round_s <= 1.15 * FAST_S


@pytest.mark.slow(slice="test_a_group_arrives_together_and_the_slowest_is_in_it")
def test_where_most_are_slow_the_fast_one_takes_more_steps_and_waits_less(world, capsys):
    names = ("median, most 1024", "group, most 1024")
    rules = {name: ran(world, SLOW_MOST_S, SHORT, **RULES[name]) for name in names}
    for name, found in rules.items():
        say(capsys, name, found)
        assert min(found.in_sets) >= 0.9
    median, group = rules.values()
    assert median.idle[0] >= 0.4
    assert group.idle[0] <= 0.15


@pytest.mark.measure
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("times_s", [UNEVEN_S, SLOW_MOST_S], ids=["uneven", "slow-most"])
def test_the_table_of_rules(world, name, times_s, capsys):
    found = ran(world, times_s, **RULES[name])
    say(capsys, name, found)
    assert found.in_sets[0] >= 0.9
