"""Whole nodes: the run's owner excludes a member, and the others go on without it; it stops and says why."""

import pytest

from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.errors import ConfigError
from atoll.protocols.ids import Round
from atoll.protocols.ledger.records import Exclude
from atoll.protocols.run.slices import ReduceSpec

ROUND_S = 10.0


def finals(w, *numbers):
    return [w.nodes[number].worker.final for number in numbers]


def sets_of(w, number, peer):
    """The rounds whose final set names work of this peer, as a node's log has them."""
    return {
        at for at, row in w.nodes[number].driver.context.log.rows.items() if row.final and peer in row.contributors
    }


@pytest.mark.parametrize("mode", ["plain", "overlap", "reduced"])
def test_the_others_go_on_without_the_excluded(world, mode):
    more = {
        "plain": {},
        "overlap": {"overlap_steps": 10},
        "reduced": {"reduce": ReduceSpec(above=1, gap=2, k=64)},
    }[mode]

    async def story() -> None:
        async with world(60, 4, **more) as w:
            for number in range(4):
                w.start(number, ROUND_S)
            await w.until(lambda: min(finals(w, *range(4))) >= 4)
            bad = w.nodes[3].peer
            owner = w.nodes[0].driver
            first = owner.finality.deciding
            assert owner.exclude(bad, None, "noise").endswith(f"from round {first} on")
            await w.until(lambda: w.nodes[3].driver.view().trouble)
            assert "noise" in w.nodes[3].driver.view().trouble
            await w.until(lambda: min(finals(w, 0, 1, 2)) >= first + 12)
            w.check_agreement()
            late = {at for number in (0, 1, 2) for at in sets_of(w, number, bad) if at > first}
            assert not late
            assert owner.reducer.is_reduced(first + 10) == (mode == "reduced")
            trained = w.nodes[3].worker.trained[-1]
            assert trained <= first + 3
            with pytest.raises(ConfigError, match="excluded"):
                w.nodes[3].driver.resume()
            assert bad not in w.nodes[1].swarm.neighbours()
            # A restart reads it again; a newcomer learns it with the ledger.
            await w.kill(3)
            w.start(3, ROUND_S)
            w.start(4, ROUND_S)
            await w.until(lambda: min(finals(w, 0, 4)) >= first + 20)
            await w.until(lambda: w.nodes[3].driver.view().trouble)
            assert w.nodes[3].worker.trained[-1] == trained
            assert w.nodes[4].driver.removals.is_excluded(bad, first)
            w.check_agreement()

    run_virtual(story())


def test_of_two_members_the_owner_goes_on_alone(world):
    async def story() -> None:
        async with world(60, 2) as w:
            for number in range(2):
                w.start(number, ROUND_S)
            await w.until(lambda: min(finals(w, 0, 1)) >= 4)
            owner, bad = w.nodes[0].driver, w.nodes[1].peer
            first = owner.finality.deciding
            owner.exclude(bad, Round(first + 2), "")
            await w.until(lambda: finals(w, 0)[0] >= first + 12)
            assert not {at for at in sets_of(w, 0, bad) if at > first + 2}
            assert sets_of(w, 0, bad) >= {first, first + 1}

    run_virtual(story())


def test_only_the_owner_can_and_never_itself(world):
    async def story() -> None:
        async with world(60, 3) as w:
            for number in range(3):
                w.start(number, ROUND_S)
            await w.until(lambda: min(finals(w, *range(3))) >= 3)
            owner, other = w.nodes[0].driver, w.nodes[1].driver
            with pytest.raises(ConfigError, match="owner"):
                other.exclude(w.nodes[2].peer, None, "")
            with pytest.raises(ConfigError, match="itself"):
                owner.exclude(w.nodes[0].peer, None, "")
            with pytest.raises(ConfigError, match="final"):
                owner.exclude(w.nodes[1].peer, Round(0), "")
            # A record of somebody else is in the ledger, and counts for nobody.
            w.nodes[2].swarm.publish(Exclude(Round(0), w.nodes[1].peer, ""))
            before = max(finals(w, *range(3)))
            await w.until(lambda: min(finals(w, *range(3))) >= before + 5)
            assert not any(node.driver.removals.found for node in w.nodes.values())
            assert max(sets_of(w, 0, w.nodes[1].peer)) > before

    run_virtual(story())
