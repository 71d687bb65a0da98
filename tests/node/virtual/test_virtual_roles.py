"""Whole nodes that do not train: no round waits for them, and what they find spares others their validation."""

import json
from itertools import pairwise

import pytest

from atoll.node.config.roles import Work
from atoll.node.daemon.rounds.state import Phase
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.ledger.records import Contribution, Leave
from atoll.protocols.ledger.registers import Lease
from tests.node.virtual.conftest import bpb_of

TRAINERS, ROUNDS = 3, 24
EVALUATES, SEEDS = Work(trains=False, evaluates=True), Work(trains=False)
RELAYS = Work(trains=False, has_model=False)


def rows(node):
    return node.driver.context.log.rows


def events(node, name):
    found = map(json.loads, (node.home / "events.jsonl").read_text().splitlines())
    return [one for one in found if one["event"] == name]


def bodies(node, of):
    return [entry.body for _, entry in node.swarm.ledger.since(0, 1 << 20) if entry.author == of.peer]


def believed(node):
    return node.driver.evaluator.validators.believed if node.driver else {}


def validated(node):
    """By an evaluator, in its newest life."""
    return node.driver.evaluator.validated if node.driver and not node.driver.evaluator.work.trains else 0


def waits_s(node):
    """Seconds from one closed round to the next."""
    times = [one["time"] for one in events(node, "closed")]
    return [after - before for before, after in pairwise(times)]


SEED = pytest.param(
    SEEDS, id="seed", marks=pytest.mark.slow(slice="test_no_round_waits_for_a_node_that_does_not_train")
)


@pytest.mark.parametrize("work", [pytest.param(EVALUATES, id="evaluate"), SEED, pytest.param(RELAYS, id="relay")])
def test_no_round_waits_for_a_node_that_does_not_train(world, work):
    async def story() -> None:
        async with world(ROUNDS, TRAINERS) as w:
            for number in range(TRAINERS):
                w.start(number)
            other = w.start(TRAINERS, work=work)
            await w.until(lambda: w.nodes[0].worker.final >= 3 and other.driver.round.final >= 3)
            assert other.driver.round.phase is Phase.OBSERVE
            leases = w.nodes[0].swarm.live(Lease)
            assert leases[other.peer].activity == "observing"
            await w.until(lambda: all(w.nodes[n].worker.final >= ROUNDS - 1 for n in range(TRAINERS)))
            await w.until(lambda: other.driver.round.phase is Phase.FINISHED)
            w.check_agreement()
            assert not [body for body in bodies(w.nodes[0], other) if isinstance(body, Contribution)]
            assert bodies(w.nodes[0], other) == [], "who does not work writes nothing"
            assert {len(row.contributors) for row in rows(other).values() if row.final} == {TRAINERS}
            assert max(waits_s(w.nodes[0])[2:]) < 12.5, "rounds of 10 s, and what a fold takes"
            if work is RELAYS:
                assert other.worker.final == -1
                assert not other.swarm.blobs.store.blobs(), "it fetches nothing of the model"

    run_virtual(story())


def test_trainers_believe_an_evaluator_whose_value_is_theirs_and_validate_no_more(world):
    async def story() -> None:
        async with world(ROUNDS, TRAINERS) as w:
            for number in range(TRAINERS):
                w.start(number).worker.evaluate_s = 0.2  # more than a hundredth of a round: not in each round
            evaluator = w.start(TRAINERS, work=EVALUATES)
            await w.until(lambda: all(believed(w.nodes[n]) for n in range(TRAINERS)))
            before = [w.nodes[n].worker.evaluated for n in range(TRAINERS)]
            first = w.newest() + 1
            await w.until(lambda: w.nodes[0].worker.final >= ROUNDS - 4)
            assert [w.nodes[n].worker.evaluated for n in range(TRAINERS)] == before
            for number in range(TRAINERS):
                found = {row.round: row for row in rows(w.nodes[number]).values() if row.final and row.val_by}
                assert len(found.keys() & set(range(first, ROUNDS - 5))) >= ROUNDS - 8 - first
                for row in found.values():
                    assert (row.val_by, row.val_bpb) == (evaluator.peer, bpb_of(bytes.fromhex(row.digest)))
            await w.kill(TRAINERS)
            await w.until(lambda: not w.nodes[0].driver.evaluator.validators.heard)
            assert not believed(w.nodes[0])

    run_virtual(story())


def test_an_evaluator_that_lies_is_not_believed_and_spares_nobody_anything(world):
    async def story() -> None:
        async with world(ROUNDS, TRAINERS) as w:
            for number in range(TRAINERS):
                w.start(number)
            w.start(TRAINERS, work=EVALUATES).worker.val_share = 0.9
            await w.until(lambda: all(w.nodes[n].worker.final >= ROUNDS - 1 for n in range(TRAINERS)))
            for number in range(TRAINERS):
                node = w.nodes[number]
                assert not believed(node)
                assert not [row for row in rows(node).values() if row.val_by]
                assert node.worker.evaluated >= ROUNDS - 1, "it costs nothing here, so each round is validated"

    run_virtual(story())


def test_a_trainer_that_comes_back_as_a_relay_leaves_its_votes(world):
    async def story() -> None:
        async with world(ROUNDS, TRAINERS) as w:
            for number in range(TRAINERS):
                w.start(number)
            await w.until(lambda: w.all_final(4))
            await w.kill(2)
            w.start(2, work=RELAYS)
            await w.until(lambda: any(isinstance(body, Leave) for body in bodies(w.nodes[0], w.nodes[2])))
            left_at = w.nodes[0].worker.final
            await w.until(lambda: all(w.nodes[n].worker.final >= left_at + 6 for n in (0, 1)), limit_s=120.0)
            w.check_agreement()

    run_virtual(story())


def test_a_trainer_that_comes_back_as_an_evaluator_still_votes_and_trains_again_later(world):
    async def story() -> None:
        async with world(ROUNDS, TRAINERS) as w:
            for number in range(TRAINERS):
                w.start(number)
            await w.until(lambda: w.all_final(4))
            await w.kill(2)
            w.start(2, work=EVALUATES)
            await w.until(lambda: validated(w.nodes[2]) >= 3)
            assert w.nodes[2].driver.round.phase is Phase.OBSERVE
            await w.kill(2)
            w.start(2)
            again = w.nodes[0].worker.final + 1
            await w.until(w.all_final)
            w.check_agreement()
            await w.check_feeds()
            last = rows(w.nodes[0])[ROUNDS - 1]
            assert w.nodes[2].peer in last.contributors
            assert again < ROUNDS - 1

    run_virtual(story())


def test_a_node_that_comes_late_validates_the_newest_round_and_not_all_before_it(world):
    async def story() -> None:
        async with world(ROUNDS, 2) as w:
            for number in range(2):
                w.start(number)
            await w.until(lambda: w.all_final(14))
            late = w.start(2, work=EVALUATES)
            await w.until(lambda: validated(late) >= 2)
            assert late.worker.evaluated <= 4
            assert min(number for number, row in rows(late).items() if row.val_bpb is not None) >= 14

    run_virtual(story())


def test_a_paused_evaluator_validates_nothing(world):
    async def story() -> None:
        async with world(ROUNDS, 2) as w:
            for number in range(2):
                w.start(number)
            evaluator = w.start(2, work=EVALUATES)
            await w.until(lambda: validated(evaluator) >= 2)
            evaluator.driver.pause("by the operator")
            await w.until(lambda: evaluator.driver.round.phase is Phase.PAUSED)
            at, final = evaluator.worker.evaluated, evaluator.worker.final
            await w.until(lambda: evaluator.worker.final >= final + 4)
            assert evaluator.worker.evaluated <= at + 1, "one may have been under way"
            evaluator.driver.resume()
            await w.until(lambda: evaluator.worker.evaluated >= at + 2)

    run_virtual(story())
