"""Whole nodes whose rounds are reduced, beside a member that says of payloads and Reductions what they are not."""

import asyncio
import json

import msgspec
import pytest

from atoll.node.daemon.consensus import proposer
from atoll.node.daemon.coordinator.finalizer import SNAPSHOT_EVERY
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.ids import Digest, Round, digest
from atoll.protocols.ledger.records import Ack, Body, Contribution, Reduction, ReductionFault
from atoll.protocols.local.worker_messages import AdoptRequest, Answer, Ask
from atoll.protocols.run.slices import ReduceSpec

from .test_virtual_hostile import corrupt, snapshot_as_payload, the_others_finish

SPEC = ReduceSpec(above=1, gap=2, k=128, sample_256=0)
CAREFUL = ReduceSpec(above=1, gap=2, k=128, sample_256=1 << 16)
ROUNDS = 2 * SNAPSHOT_EVERY + 4


def contributions(node, number):
    found = node.driver.contributions._found.values()
    return {author: body for author, body in found if body.round == number}


@pytest.mark.parametrize("kind", [Contribution, Reduction])
def test_a_snapshot_that_is_announced_as_a_payload_is_void(world, kind):
    """Everybody holds that blob already: being on disk is not enough, whatever it is said to be."""

    async def story() -> None:
        async with world(ROUNDS, 4, reduce=SPEC) as w:
            await snapshot_as_payload(w, kind, 900.0)

    run_virtual(story())


FIRST = pytest.mark.slow(slice="test_a_payload_of_another_under_ones_own_rows[6]")


@pytest.mark.parametrize("at", [pytest.param(1, marks=FIRST), 6])
def test_a_payload_of_another_under_ones_own_rows(world, at):
    """Whoever adds whole payloads up must see what those see who add rows up: as a whole it counts nowhere.

    The liar takes all steps, to be the last: it copies what another has announced.
    """
    said = []

    async def story() -> None:
        async with world(ROUNDS, 4, reduce=SPEC, least_256=256) as w:
            for number in range(4):
                w.start(number, train_s=8.0 if number < 3 else 12.0)

            def lie(body: Body) -> Body:
                known = contributions(w.nodes[3], at)
                if said or not isinstance(body, Contribution) or body.round != at or not known:
                    return body
                said.append(next(iter(known.values())).payload)
                return msgspec.structs.replace(body, payload=said[0])

            await w.until(lambda: w.nodes[3].driver is not None)
            corrupt(w.nodes[3], lie)
            await w.until(lambda: the_others_finish(w, 3), 1800.0)
            assert said
            w.check_agreement()
            for node in w.nodes.values():
                assert "divergence" not in (node.home / "events.jsonl").read_text()

    run_virtual(story())


def test_an_old_reduction_that_names_what_is_needed_now_takes_nothing_along(world):
    """When payloads of old rounds are dropped, a newer contribution's and an offered snapshot stay."""
    said: list[Digest] = []

    async def story() -> None:
        async with world(3 * SNAPSHOT_EVERY + 4, 4, reduce=SPEC) as w:
            for number in range(4):
                w.start(number)
            liar = None

            def lie(body: Body) -> Body:
                if isinstance(body, Ack) and body.round == 2 * SNAPSHOT_EVERY - 1 and not said:
                    old = next(c for c in liar.driver.reducer.ledger.claims.values() if c.author == liar.peer)
                    newest = max(number for number in range(99) if contributions(liar, number))
                    wanted = next(iter(contributions(liar, newest).values())).payload
                    for blob in (wanted, liar.driver.finalizer.offer.blob):
                        said.append(blob)
                        again = msgspec.structs.replace(old.body, round=Round(2), payload=blob)
                        asyncio.get_running_loop().call_soon(liar.driver.guard.publish, again)
                return body

            await w.until(lambda: w.newest() >= 6)
            liar = w.nodes[3]
            corrupt(liar, lie)
            await w.until(lambda: said)
            await w.until(lambda: the_others_finish(w, 3), 900.0)
            w.check_agreement()

    run_virtual(story())


def test_who_reduces_many_times_is_folded_once(world):
    """Only its first Reduction of a round changes a set."""

    async def story() -> None:
        async with world(8, 4, reduce=SPEC) as w:
            for number in range(4):
                w.start(number)
            await w.until(lambda: w.newest() >= 2)
            publish = w.nodes[3].driver.net.publish

            def lie(body: Body) -> Body:
                if isinstance(body, Reduction):
                    for weight in range(8):
                        again = msgspec.structs.replace(body, kept=digest(bytes([weight])))
                        asyncio.get_running_loop().call_later(0.2 * weight, publish, again)
                return body

            corrupt(w.nodes[3], lie)
            await w.until(lambda: the_others_finish(w, 3), 600.0)
            w.check_agreement()
            for node in list(w.nodes.values())[:3]:
                lines = (node.home / "events.jsonl").read_text().splitlines()
                made = [event["round"] for event in map(json.loads, lines) if event["event"] == "slices"]
                assert sorted(made) == sorted(set(made)), "no set of slices was made twice"
                assert len(made) >= 4

    run_virtual(story())


def test_proofs_are_kept_as_long_as_their_round_and_false_ones_not_at_all(world):
    false: list[Digest] = []

    async def story() -> None:
        async with world(3 * SNAPSHOT_EVERY, 4, reduce=CAREFUL) as w:
            for number in range(4):
                w.start(number)
            liar, fool = w.nodes[2], w.nodes[3]
            liar.worker.lies = True

            def lie(body: Body) -> Body:
                if isinstance(body, Reduction) and not false:
                    claims = fool.driver.reducer.ledger.claims.values()
                    for theirs in [claim for claim in claims if claim.author != fool.peer]:
                        false.append(fool.swarm.blobs.store.add_bytes(b"no proof" * (99 + len(false))))
                        fault = ReductionFault(theirs.body.round, theirs.entry, false[-1])
                        asyncio.get_running_loop().call_soon(fool.driver.guard.publish, fault)
                return body

            await w.until(lambda: w.newest() >= 3)
            corrupt(fool, lie)
            proofs: set[Digest] = set()

            def seen() -> bool:
                proofs.update(
                    blob for node in w.nodes.values() for blob in node.driver.reducer._doubts.reports.proofs()
                )
                return w.newest() >= 7

            await w.until(seen)
            liar.worker.lies = False
            true = proofs - set(false)
            assert true
            assert len(false) > 1
            honest = [node for node in w.nodes.values() if node is not fool]
            names = {blob.hex() for blob in false}
            fetched = [name for node in honest for name in node.worker.judged if name in names]
            assert len(fetched) == len(honest), "who told one that proves nothing is not heard again"
            assert any(node.swarm.blobs.store.has(blob) for blob in true for node in w.nodes.values())
            await w.until(w.all_final)
            w.check_agreement()
            for node in w.nodes.values():
                assert not any(node.swarm.blobs.store.has(blob) for blob in true), "their rounds are forgotten"
                assert node is fool or not any(node.swarm.blobs.store.has(blob) for blob in false)

    run_virtual(story())


def test_a_worker_that_lost_much_is_told_in_which_slices_its_payloads_were_used(world):
    """Contributions that snapshots cover are forgotten, and with them what a Reduction covered."""

    async def story() -> None:
        async with world(3 * SNAPSHOT_EVERY + 3, 3, reduce=SPEC) as w:
            for number in range(3):
                w.start(number)
            node = w.nodes[0]
            await w.until(lambda: node.worker.final == 0, look_s=0.1)
            old = node.worker.final, node.worker.state
            used = {}

            def look() -> bool:
                used.update({n: own[node.peer].payload for n in range(99) if (own := contributions(node, n))})
                return node.worker.final >= 3 * SNAPSHOT_EVERY

            await w.until(look)
            told, answer = [], node.worker._answer

            async def listen(ask: Ask) -> Answer:
                told.extend([ask] if isinstance(ask, AdoptRequest) else [])
                return await answer(ask)

            node.worker._answer = listen
            node.worker.final, node.worker.state = old
            await node.crash_worker(0.3)
            await w.until(w.all_final)
            assert told, "it went back behind what payloads are kept for"
            counted = {one.payload: sum(span.chunks for span in one.spans) for one in told[0].included}
            for number in range(1, told[0].round):
                assert counted[used[number]] == node.worker.layout.chunks, number

    run_virtual(story())


def test_who_proposes_reductions_alone_stops_nobody(world, monkeypatch):
    """All would fold such a set alike; but the authors of a set decide the next round, and it has none."""
    real, tried = proposer._choice_to_propose, set[int]()

    async def story() -> None:
        async with world(10, 4, reduce=CAREFUL) as w:
            for number in range(4):
                w.start(number)
            liar = w.nodes[2].peer

            def value(state, ballot):
                found = real(state, ballot)
                book = state.book
                if found is None or state.me != liar or book.reductions.keys().isdisjoint(found.names):
                    return found
                tried.add(state.last_final + 1)
                return found._replace(names=tuple(name for name in found.names if name in book.reductions))

            monkeypatch.setattr(proposer, "_choice_to_propose", value)
            await w.until(w.all_final)
            w.check_agreement()

    run_virtual(story())
    assert tried
