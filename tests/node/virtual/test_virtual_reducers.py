"""Whole nodes beside a reducer that lies and does not open its lies: its slice is raw, and it loses its place."""

import asyncio

import pytest
from msgspec.structs import replace

from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.ledger.records import PlannedContribution, Unanswered, encode_entry, sign_entry
from atoll.protocols.run.slices import ReduceSpec

SPARE = ReduceSpec(above=1, gap=2, k=128, sample_256=0)
CAREFUL = ReduceSpec(above=1, gap=2, k=128, sample_256=1 << 16)


MORE = pytest.mark.slow(slice="test_a_reducer_that_does_not_open_what_it_lied_about_is_done_without")


@pytest.mark.parametrize(
    ("lies_about", "seed"), [(1, 1), (None, 1), pytest.param(1, 2, marks=MORE), pytest.param(1, 4, marks=MORE)]
)
def test_a_reducer_that_does_not_open_what_it_lied_about_is_done_without(world, lies_about, seed):
    """In some of these runs it owns the first attempt of a round: finality is slow, plans are known too late."""

    def with_seed(spec):
        return replace(spec, seed=seed)

    async def story() -> None:
        async with world(14, 4, reduce=CAREFUL, adjust=with_seed) as w:
            for number in range(4):
                w.start(number)
            mute = w.nodes[2]
            mute.worker.lies, mute.worker.lies_about, mute.worker.opens = True, lies_about, False
            await w.until(w.all_final)
            w.check_agreement()
            await w.check_feeds()
            for node in w.nodes.values():
                counted = {m.author for parts in node.worker.sliced.values() for p in parts for m in p.reduced}
                assert mute.peer not in counted, "nothing of it is in a final set"
                assert counted, "the others' Reductions are"
            plans = [set(w.nodes[0].driver.reducer.ledger.plan(n).reducers) for n in range(14)]
            planned = [n for n in range(14) if mute.peer in plans[n]]
            others = {node.peer for node in w.nodes.values()} - {mute.peer}
            assert all(plan >= others for plan in plans[2:]), "the others keep their places"
            assert planned[:2] == [2, 3]
            assert len(planned) < 8, "it is passed over, ever longer"
            events = (w.nodes[0].home / "events.jsonl").read_text()
            assert "reduction_silent" in events
            assert "reduction_wrong" not in events, "nothing was proven"
            for node in w.nodes.values():
                trusted, silent = (node.driver.view().standings.of(w.nodes[n].peer)[0] for n in (0, 2))
                assert trusted.why == ""
                assert silent.why == f"no Reduction of it counts up to round {silent.distrusted_until}"
                assert silent.distrusted_until >= 13 - 1 or node is mute

    run_virtual(story())


@pytest.mark.parametrize("dies", ["worker", "node"])
def test_a_reducer_that_dies_between_a_reduction_and_its_openings_keeps_its_place(world, dies):
    """The next worker makes it again, and opens what was asked for."""

    async def story() -> None:
        async with world(12, 4, reduce=replace(CAREFUL, gap=4)) as w:
            for number in range(4):
                w.start(number)
            victim = w.nodes[1]
            await w.until(lambda: victim.driver is not None and victim.driver.reducer.ledger.ours(5), look_s=0.02)
            if dies == "worker":
                await victim.crash_worker(15.0)
            else:
                await w.kill(1)
                await asyncio.sleep(8.0)
                w.start(1)
            await w.until(w.all_final)
            w.check_agreement()
            ledger = w.nodes[0].driver.reducer.ledger
            for number in range(4, 12):
                plan = ledger.plan(number)
                assert plan.reducers, number
                assert len(plan.reducers) == len(plan.authors), "nobody is passed over"
                work = [ledger.entries[offer.entry].body for offer in ledger.offers(number)]
                assert all(isinstance(body, PlannedContribution) for body in work), "finality was quick"
            events = [(node.home / "events.jsonl").read_text() for node in w.nodes.values()]
            assert any("reduction_silent" in each for each in events) == (dies == "worker")
            for node in w.nodes.values():
                assert not any(node.driver.view().standings.of(other.peer)[0].why for other in w.nodes.values())

    run_virtual(story())


def test_a_member_that_complains_about_everybody_costs_nobody_a_slice(world):
    async def story() -> None:
        async with world(10, 4, reduce=CAREFUL) as w:
            for number in range(4):
                w.start(number)
            fool, said = w.nodes[3], set()

            def complain() -> bool:
                if fool.driver is not None:
                    for claim in list(fool.driver.reducer.ledger.claims.values()):
                        if claim.author != fool.peer and claim.entry not in said:
                            said.add(claim.entry)
                            body = Unanswered(claim.body.round, claim.entry, claim.body.span.start)
                            fool.driver.guard.publish(body)
                return w.all_final()

            await w.until(complain)
            w.check_agreement()
            assert len(said) > 12
            for node in w.nodes.values():
                reduced = [sum(bool(p.reduced) for p in node.worker.sliced.get(n, ())) for n in range(10)]
                assert reduced[4:] == [4] * 6
                assert "reduction_silent" not in (node.home / "events.jsonl").read_text()

    run_virtual(story())


async def cut_off_with_another_history(w, liar, alone, rest):
    """`alone` is cut off and gets a twin of the liar's next contribution, which is returned with the twin."""
    w.network.cut([alone.peer], [node.peer for node in (*rest, liar)])
    last = alone.swarm.ledger.head(liar.peer)

    def news():
        found = rest[0].swarm.ledger.entries(author=liar.peer)
        return [entry for entry in found if entry.seq > last.seq]

    def works():
        return [entry for entry in news() if isinstance(entry.body, PlannedContribution)]

    await w.until(lambda: bool(works()), look_s=0.02)
    made = works()[0]
    twin = replace(made.body, tokens=made.body.tokens + 1)
    other = sign_entry(w.spec.id, liar.identity, made.seq, made.previous, twin)
    for entry in (*(entry for entry in news() if entry.seq < made.seq), other):
        alone.swarm.replication._on_entry(liar.peer, encode_entry(entry))
    return made, other


def test_a_member_with_two_histories_stops_no_node_of_a_reduced_run(world):
    """A node that was cut off holds the other history: it folds what the final sets name, and knows the plans."""

    async def story() -> None:
        async with world(30, 5, reduce=SPARE) as w:
            for number in range(5):
                w.start(number)
            others, liar = [w.nodes[number] for number in range(4)], w.nodes[4]
            alone, rest = others[0], others[1:]
            await w.until(lambda: min(node.worker.final for node in others) >= 3)
            made, _ = await cut_off_with_another_history(w, liar, alone, rest)
            number = made.body.round
            await w.until(lambda: min(node.driver.finality.last_final for node in rest) >= number)
            await w.kill(4)
            del w.nodes[4], w.hosts[4]
            w.network.heal()
            await w.until(lambda: alone.worker.final >= number, 30.0)
            await w.until(lambda: min(node.worker.final for node in others) >= number + 3, 120.0)
            assert liar.peer in rest[0].driver.context.log.rows[number].contributors, "its work is final"
            assert alone.swarm.ledger.orphans()
            plans = [node.driver.reducer.ledger for node in others]
            for at in range(number, number + 4):
                assert len({plan.plan(at).reducers for plan in plans}) == 1
            w.check_agreement()

    run_virtual(story())


def test_a_reduction_may_cover_a_history_that_its_set_does_not_name(world):
    """The liar dies before all have its payload: only a Reduction that covers its work is in the final set."""

    async def story() -> None:
        async with world(30, 7, reduce=SPARE) as w:
            for number in range(7):
                w.start(number)
            others, liar = [w.nodes[number] for number in range(6)], w.nodes[6]
            alone, rest = others[0], others[1:]
            await w.until(lambda: min(node.worker.final for node in others) >= 3)
            made, other = await cut_off_with_another_history(w, liar, alone, rest)
            number, ledger = made.body.round, rest[0].driver.reducer.ledger

            def covering():
                claims = [claim for claim in ledger.claims.values() if claim.body.round == number]
                return [c for c in claims if made.id in {offer.entry for offer in ledger.covered(c)}]

            await w.until(lambda: bool(covering()), look_s=0.02)
            await w.kill(6)
            del w.nodes[6], w.hosts[6]
            for node in rest:
                node.swarm.replication._on_entry(liar.peer, encode_entry(other))
            await w.until(lambda: min(node.driver.finality.last_final for node in rest) >= number)
            assert liar.peer not in rest[0].driver.context.log.rows[number].contributors, "its set lacks it"
            assert reduced_slices_cover(rest[0], number, covering())
            w.network.heal()
            await w.until(lambda: alone.worker.final >= number, 30.0)
            assert alone.swarm.ledger.orphans() == [made]
            w.check_agreement()

    run_virtual(story())


def reduced_slices_cover(node, number, claims):
    """Whether one of these Reductions is in the final set."""
    final = {member.entry for part in node.worker.sliced[number] for member in part.reduced}
    return bool(final & {claim.entry for claim in claims})
