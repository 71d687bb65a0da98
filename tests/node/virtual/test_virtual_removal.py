"""Whole nodes: the owner or the voters exclude a member; the others go on without it, it stops and says why."""

import pytest

from atoll.node.daemon.consensus.types import RECENT_ROUNDS
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


@pytest.mark.parametrize("mode", ["plain", "reduced"])
def test_the_voters_exclude_a_member_when_the_owner_is_lost(world, mode):
    more = {"plain": {}, "reduced": {"reduce": ReduceSpec(above=1, gap=2, k=64)}}[mode]

    async def story() -> None:
        async with world(60, 5, **more) as w:
            for number in range(5):
                w.start(number, ROUND_S)
            await w.until(lambda: min(finals(w, *range(5))) >= 4)
            await w.kill(0)
            bad = w.nodes[4].peer
            before = finals(w, 1)[0]
            # The owner worked lately, and one that worked lately is not outvoted by being away.
            assert "of the 4 votes" in w.nodes[1].driver.exclude(bad, None, "noise")
            await w.until(lambda: min(finals(w, 1, 2, 3)) >= before + RECENT_ROUNDS + 2)
            for number in (1, 2):
                assert "of the 3 votes" in w.nodes[number].driver.exclude(bad, None, "noise")
            before = finals(w, 1)[0]
            await w.until(lambda: min(finals(w, 1, 2, 3)) >= before + 5)
            assert not w.nodes[3].driver.removals.found, "two of four are no quorum"
            (votes,) = w.nodes[3].driver.view().votes_against
            assert (votes.peer, votes.votes, votes.needed, votes.by_us) == (bad, 2, 3, False)
            w.nodes[3].driver.exclude(bad, None, "")
            await w.until(lambda: w.nodes[4].driver.view().trouble)
            assert "two thirds of the voters excluded this node" in w.nodes[4].driver.view().trouble
            first = w.nodes[1].driver.removals.found[bad].round
            await w.until(lambda: min(finals(w, 1, 2, 3)) >= first + 8)
            w.check_agreement()
            assert {w.nodes[number].driver.removals.found[bad].round for number in (1, 2, 3, 4)} == {first}
            assert not {at for number in (1, 2, 3) for at in sets_of(w, number, bad) if at >= first}
            assert bad not in w.nodes[1].swarm.neighbours()
            # A restart, and a newcomer that has the feeds as a whole, find the same.
            await w.kill(1)
            w.start(1, ROUND_S)
            w.start(5, ROUND_S)
            await w.until(lambda: min(finals(w, 1, 2, 5)) >= first + 14)
            assert {w.nodes[number].driver.removals.found[bad].round for number in (1, 5)} == {first}
            w.check_agreement()

    run_virtual(story())


def test_nobody_excludes_itself_or_the_owner(world):
    async def story() -> None:
        async with world(60, 3) as w:
            for number in range(3):
                w.start(number, ROUND_S)
            await w.until(lambda: min(finals(w, *range(3))) >= 3)
            owner, other = w.nodes[0].driver, w.nodes[1].driver
            with pytest.raises(ConfigError, match="owner"):
                other.exclude(w.nodes[0].peer, None, "")
            with pytest.raises(ConfigError, match="itself"):
                other.exclude(w.nodes[1].peer, None, "")
            with pytest.raises(ConfigError, match="itself"):
                owner.exclude(w.nodes[0].peer, None, "")
            with pytest.raises(ConfigError, match="final"):
                owner.exclude(w.nodes[1].peer, Round(0), "")
            # A vote alone counts for nothing; one against the owner is in the ledger, and counts for nobody.
            for peer in (w.nodes[0].peer, w.nodes[1].peer):
                w.nodes[2].swarm.publish(Exclude(Round(0), peer, ""))
            w.nodes[1].swarm.publish(Exclude(Round(0), w.nodes[0].peer, ""))
            before = max(finals(w, *range(3)))
            await w.until(lambda: min(finals(w, *range(3))) >= before + 5)
            assert not any(node.driver.removals.found for node in w.nodes.values())
            assert max(sets_of(w, 0, w.nodes[1].peer)) > before

    run_virtual(story())
