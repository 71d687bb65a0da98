"""Whole nodes: the owner or the voters exclude a member; the others go on without it, it stops and says why."""

import asyncio
from functools import partial

import pytest
import torch
from msgspec.structs import replace

from atoll.node.daemon.consensus.types import RECENT_ROUNDS
from atoll.node.learning.outer.fold import round_set
from atoll.node.worker.folding.fold_requests import fold_of
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.errors import ConfigError
from atoll.protocols.ids import Round
from atoll.protocols.ledger.records import Exclude
from atoll.protocols.run.run_spec import Stage
from atoll.protocols.run.slices import ReduceSpec
from tests.node.virtual.real_worker import RealWorker, Seen

ROUND_S = 10.0
WINDOW = 8


def excising(spec):
    return replace(spec, pace=replace(spec.pace, excise_rounds=WINDOW))


def excised_in(w, number, peer):
    done = w.nodes[number].driver.finality.excised.get(peer)
    return done and done.round


def finals(w, *numbers):
    return [w.nodes[number].worker.final for number in numbers]


def sets_of(w, number, peer):
    """The rounds whose final set names work of this peer, as a node's log has them."""
    return {
        at for at, row in w.nodes[number].driver.context.log.rows.items() if row.final and peer in row.contributors
    }


OVERLAP = pytest.param(
    "overlap",
    marks=pytest.mark.slow(
        slice=(
            "test_the_work_of_the_excluded_is_taken_out_by_all_in_one_round[overlap], "
            "test_the_others_go_on_without_the_excluded[plain]"
        )
    ),
)


@pytest.mark.parametrize("mode", ["plain", OVERLAP, "reduced"])
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


@pytest.mark.parametrize("since", [None, Round(0)])
def test_of_two_members_the_owner_goes_on_alone(world, since):
    """The other one's vote may be what a quorum lacks: then the epoch of the owner takes its work out."""

    async def story() -> None:
        async with world(60, 2, adjust=excising) as w:
            for number in range(2):
                w.start(number, ROUND_S)
            await w.until(lambda: min(finals(w, 0, 1)) >= 4)
            owner, bad = w.nodes[0].driver, w.nodes[1].peer
            first = owner.finality.deciding
            owner.exclude(bad, Round(first + 2), "", since)
            await w.until(lambda: finals(w, 0)[0] >= first + 12)
            assert (excised_in(w, 0, bad) is not None) == (since is not None)
            assert not {at for at in sets_of(w, 0, bad) if at > first + 2}
            assert sets_of(w, 0, bad) >= {first, first + 1}

    run_virtual(story())


@pytest.mark.parametrize(
    "mode",
    [
        "plain",
        pytest.param(
            "reduced",
            marks=pytest.mark.slow(slice="test_the_voters_exclude_a_member_when_the_owner_is_lost[plain]"),
        ),
    ],
)
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


@pytest.mark.parametrize("count", [2, 3])
def test_an_owner_that_was_cut_off_stays_in_its_chain_if_it_excluded_all_others(world, count):
    """It left it for theirs, had no model of that from anybody, and stood still for good."""

    async def story() -> None:
        async with world(400, 1) as w:
            for number in range(count):
                w.start(number, ROUND_S)
            await w.until(lambda: min(finals(w, *range(count))) >= 4)
            owner, others = w.nodes[0], [w.nodes[number].peer for number in range(1, count)]
            w.network.cut([owner.peer], others)
            await asyncio.sleep(w.spec.pace.lease_s + 10 * ROUND_S)
            for peer in others:
                owner.driver.exclude(peer, None, "gone")
            await asyncio.sleep(3 * ROUND_S)
            before = owner.worker.final
            assert min(finals(w, *range(count))) > 8, "each side went on"
            w.network.heal()
            await w.until(lambda: owner.worker.final >= before + 6, 12 * ROUND_S)
            assert all(number > 0 for number, _ in w.changes)

    run_virtual(story())


def test_the_model_of_a_chain_comes_from_the_excluded_if_nobody_else_has_it(world):
    """A member that is not excluded made their chain count, and is dead. The owner waited for it for good."""

    async def story() -> None:
        async with world(400, 1) as w:
            for number in range(4):
                w.start(number, ROUND_S)
            await w.until(lambda: min(finals(w, *range(4))) >= 4)
            owner, others = w.nodes[0], [w.nodes[number].peer for number in range(1, 4)]
            w.network.cut([owner.peer], others)
            await asyncio.sleep(w.spec.pace.lease_s + 10 * ROUND_S)
            for peer in others[:2]:
                owner.driver.exclude(peer, None, "gone")
            await asyncio.sleep(3 * ROUND_S)
            await w.kill(3)
            before = max(finals(w, *range(4)))
            w.network.heal()
            await w.until(lambda: owner.worker.final >= before + 6, w.spec.pace.lease_s + 12 * ROUND_S)
            assert {number for number, _ in w.changes} == {0}, "it left its chain for theirs"
            assert not owner.swarm.neighbours(), "it cut them off again"

    run_virtual(story())


# --- work that is taken out of final rounds -----------------------------------------------------------


PLAIN = pytest.param(
    "plain",
    marks=pytest.mark.slow(slice="test_the_work_of_the_excluded_is_taken_out_by_all_in_one_round[overlap]"),
)


@pytest.mark.parametrize("mode", [PLAIN, "overlap"])
def test_the_work_of_the_excluded_is_taken_out_by_all_in_one_round(world, mode):
    """By those that are there, one that restarts before and after it, and newcomers before and after it."""
    more = {"plain": {}, "overlap": {"overlap_steps": 10}}[mode]

    async def story() -> None:
        async with world(80, 4, adjust=excising, **more) as w:
            for number in range(4):
                w.start(number, ROUND_S)
            await w.until(lambda: min(finals(w, *range(4))) >= 14)
            w.start(4, ROUND_S)  # a newcomer that begins with a snapshot, and lacks payloads of the window
            await w.until(lambda: finals(w, 4)[0] >= 14)
            await w.kill(2)
            bad, owner = w.nodes[3].peer, w.nodes[0].driver
            first = owner.finality.deciding
            line = owner.exclude(bad, None, "noise", Round(0))
            assert f"since round {first - WINDOW}" in line
            await w.until(lambda: excised_in(w, 0, bad) is not None)
            number = excised_in(w, 0, bad)
            w.start(2, ROUND_S)  # it was away when the others decided
            await w.until(lambda: min(finals(w, 0, 1, 2, 4)) >= number + 4)
            assert {excised_in(w, at, bad) for at in (0, 1, 2, 4)} == {number}
            assert first <= number <= first + 3
            w.check_agreement()
            window = owner.finality.window
            authors = {peer for counted in window.values() for peer in counted.values()}
            assert bad not in authors
            assert w.nodes[1].peer in authors
            (shown,) = owner.view().excluded
            assert (shown.excised_in, shown.excise_since) == (number, number - WINDOW)
            # A restart and a newcomer afterwards find the same in the ledger.
            await w.kill(1)
            w.start(1, ROUND_S)
            w.start(5, ROUND_S)
            await w.until(lambda: min(finals(w, 0, 1, 5)) >= number + 10)
            assert {excised_in(w, at, bad) for at in (1, 5)} == {number}
            w.check_agreement()

    run_virtual(story())


def test_the_voters_take_out_work_when_the_owner_is_lost(world):
    async def story() -> None:
        async with world(80, 5, adjust=excising) as w:
            for number in range(5):
                w.start(number, ROUND_S)
            await w.until(lambda: min(finals(w, *range(5))) >= 4)
            await w.kill(0)
            bad = w.nodes[4].peer
            before = finals(w, 1)[0]
            await w.until(lambda: min(finals(w, 1, 2, 3)) >= before + RECENT_ROUNDS + 2)
            for number in (1, 2):
                w.nodes[number].driver.exclude(bad, None, "noise", Round(0))
            before = finals(w, 1)[0]
            await w.until(lambda: min(finals(w, 1, 2, 3)) >= before + 5)
            assert not w.nodes[3].driver.removals.found, "two of four are no quorum"
            w.nodes[3].driver.exclude(bad, None, "noise", Round(0))
            await w.until(lambda: all(excised_in(w, at, bad) is not None for at in (1, 2, 3)))
            (number,) = {excised_in(w, at, bad) for at in (1, 2, 3)}
            await w.until(lambda: min(finals(w, 1, 2, 3)) >= number + 4)
            w.check_agreement()
            assert sets_of(w, 1, bad), "the log still says who contributed"

    run_virtual(story())


def test_a_payload_that_nobody_has_stops_the_correction_and_nothing_else(world):
    """Also a member that missed it alone: it waits, and goes on with a snapshot of a later round."""

    async def story() -> None:
        async with world(60, 4, adjust=excising) as w:
            for number in range(4):
                w.start(number, ROUND_S)
            await w.until(lambda: min(finals(w, *range(4))) >= 9)
            bad, owner = w.nodes[3].peer, w.nodes[0].driver
            owner.exclude(bad, None, "", Round(0))
            lost = next(iter(owner.finality.window[owner.finality.last_final - 3]))
            (found,) = owner.contributions.find([lost])
            for node in w.nodes.values():
                node.driver.net.delete_blob(found[2].payload)
            before = finals(w, 0)[0]
            await w.until(lambda: min(finals(w, 0, 1, 2)) >= before + WINDOW + 3)
            w.check_agreement()

    run_virtual(story())


def test_a_correction_that_leaves_the_range_of_weights_stops_neither_the_run_nor_others(world):
    """Others train against what a member sends, so it can make its own removal impossible."""

    async def story() -> None:
        async with world(60, 5, adjust=excising) as w:
            for number in range(5):
                w.start(number, ROUND_S)
            await w.until(lambda: min(finals(w, *range(5))) >= 4)
            bad, worse, owner = w.nodes[3].peer, w.nodes[4].peer, w.nodes[0].driver
            for node in w.nodes.values():
                node.worker.overflows = frozenset({worse})
            for peer in (bad, worse):
                owner.exclude(peer, None, "", Round(0))
            await w.until(lambda: all(excised_in(w, at, bad) is not None for at in (0, 1, 2)))
            before = finals(w, 0)[0]
            await w.until(lambda: min(finals(w, 0, 1, 2)) >= before + 4)
            assert excised_in(w, 0, worse) is None
            w.check_agreement()

    run_virtual(story())


def test_real_workers_hold_the_fold_of_the_sets_without_the_excluded(world):
    """`RealWorker` compares the view of every worker with that of any other whose sets are the same."""
    torch.set_num_threads(1)
    seen = Seen({}, {}, {}, {})

    def adjust(spec):
        data = replace(spec.data, source="synthetic:markov?size=65536")
        outer = replace(spec.outer, stages=(Stage(0, 4),), floor_256=64, aggregate="nnm")
        return excising(replace(spec, data=data, outer=outer))

    async def story() -> None:
        async with world(12, 3, adjust=adjust, worker=partial(RealWorker, seen=seen)) as w:
            for number in range(3):
                w.start(number)
            await w.until(lambda: min(finals(w, *range(3))) >= 2)
            bad, owner = w.nodes[2].peer, w.nodes[0].driver
            owner.exclude(bad, None, "", Round(0))
            await w.until(lambda: excised_in(w, 0, bad) is not None)
            number = excised_in(w, 0, bad)
            gone = seen.gone[number]
            await w.until(lambda: min(finals(w, 0, 1)) >= number + 1)
            w.check_agreement()
            # From the start weights and the payloads: a fold that never saw the member's work.
            session, names = w.nodes[0].worker.session, seen.sets_at(number)
            assert gone
            assert gone.isdisjoint(name for each in names.values() for name in each)
            fold = fold_of(w.spec, session._fold._apply_update)
            for at in range(number + 1):
                found = owner.contributions.find(sorted(names[at]))
                assert len(found) == len(names[at])
                assert bad not in {author for _, author, _ in found}
                fold.prepare_final(round_set(at, owner.sets._members(Round(at), found)))()
            assert fold.state_digest().hex() == owner.context.log.rows[number].digest

    run_virtual(story())
