"""Whole nodes beside a member that announces payloads which are none: the others must not stop."""

import asyncio
import random
from collections.abc import Callable

import msgspec
import pytest
from msgspec.structs import replace

from atoll.node.daemon.coordinator.finalizer import SNAPSHOT_EVERY
from atoll.p2p.blobs.store import BlobStore
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.blobs import manifest_of_bytes
from atoll.protocols.ids import Digest
from atoll.protocols.ledger.records import Ack, Body, Contribution, Entry, encode_entry, sign_entry

Liar = Callable[[Body], Body]


def corrupt(node, change: Liar) -> None:
    """From now on `node` publishes `change(body)` in place of each body."""
    honest = node.driver.net.publish
    node.driver.net.publish = lambda body: honest(change(body))


def the_others_finish(world, liar: int) -> bool:
    last = world.spec.outer.rounds - 1
    return all(node.worker.final >= last for node in world.nodes.values() if node.number != liar)


async def snapshot_as_payload(w, kind: type[Body], limit_s: float) -> None:
    """Node 3 names node 0's snapshot, which all hold, as the payload of its first record of this kind."""
    said = []
    for number in range(4):
        w.start(number)
    await w.until(lambda: w.newest() >= 1)
    await w.until(lambda: all(node.driver.finalizer.offer for node in w.nodes.values()))

    def lie(body: Body) -> Body:
        if said or not isinstance(body, kind):
            return body
        said.append(w.nodes[0].driver.finalizer.offer.blob)
        return msgspec.structs.replace(body, payload=said[0])

    corrupt(w.nodes[3], lie)
    await w.until(lambda: said)
    await asyncio.sleep(2.0)
    assert w.nodes[0].swarm.blobs.store.has(said[0]), "the snapshot is still offered"
    await w.until(lambda: the_others_finish(w, 3), limit_s)
    w.check_agreement()


WITH_OVERLAP = pytest.mark.slow(slice="test_a_snapshot_that_is_announced_as_a_payload_is_void")


@pytest.mark.parametrize("overlap_steps", [0, pytest.param(10, marks=WITH_OVERLAP)])
def test_a_snapshot_that_is_announced_as_a_payload_is_void(world, overlap_steps):
    """Everybody holds that blob already: being on disk is not enough to be held as a payload."""

    async def story() -> None:
        async with world(2 * SNAPSHOT_EVERY + 4, 4, overlap_steps=overlap_steps) as w:
            await snapshot_as_payload(w, Contribution, 600.0)

    run_virtual(story())


def test_what_others_still_need_is_not_deleted_as_an_old_payload(world):
    """A member named it as its payload of a round that newer snapshots cover by now."""
    missing = []

    async def story() -> None:
        async with world(4 * SNAPSHOT_EVERY, 4) as w:
            tokenizer = manifest_of_bytes(b"{}").id
            w.spec = replace(w.spec, data=replace(w.spec.data, tokenizer="file", tokenizer_blob=tokenizer))
            for number in range(4):
                BlobStore(w.root / f"n{number}" / "blobs").add_bytes(b"{}")
                w.start(number)
            await w.until(lambda: w.newest() >= 0)
            await w.until(lambda: all(node.driver.finalizer.offer for node in w.nodes.values()))
            driver, store = w.nodes[0].driver, w.nodes[0].swarm.blobs.store

            def lie(body: Body) -> Body:
                """One more contribution to an old round with each ack."""
                old = next(c for _, c in w.nodes[3].driver.contributions._found.values())
                for blob in (tokenizer, driver.finalizer.offer.blob) if isinstance(body, Ack) else ():
                    again(msgspec.structs.replace(old, round=0, payload=blob))
                return body

            again = w.nodes[3].driver.net.publish
            corrupt(w.nodes[3], lie)
            drop = driver.sets.drop

            def watch(before: int, kept: set[Digest]) -> None:
                drop(before, kept)
                needed = {
                    "tokenizer": tokenizer,
                    "newest": driver.finalizer.offer.blob,
                    "older": driver.finalizer._older_offer.blob,
                }
                missing.extend(name for name, blob in needed.items() if not store.has(blob))

            driver.sets.drop = watch
            await w.until(lambda: the_others_finish(w, 3), 900.0)
            w.check_agreement()

    run_virtual(story())
    assert not missing


def test_a_kill_before_a_fetched_payload_was_looked_at(world, tmp_path):
    """After the restart it lies in the store like any other, and is looked at before it counts."""
    junk = tmp_path / "junk"
    junk.write_bytes(random.Random(1).randbytes(77))

    async def story() -> None:
        async with world(8, 4) as w:
            for number in range(4):
                w.start(number)
            await w.until(lambda: w.newest() >= 2)
            said = []

            def lie(body: Body) -> Body:
                if said or not isinstance(body, Contribution):
                    return body
                said.append(w.nodes[3].swarm.blobs.store.add_file(junk))
                return msgspec.structs.replace(body, payload=said[0])

            corrupt(w.nodes[3], lie)
            await w.until(lambda: said, look_s=0.001)
            alive = {0, 1, 2}
            while alive:
                await asyncio.sleep(0.001)
                for number in [n for n in alive if w.nodes[n].swarm.blobs.store.has(said[0])]:
                    await w.kill(number)
                    alive.discard(number)
            for number in range(3):
                w.start(number)
            await w.until(lambda: the_others_finish(w, 3), 600.0)
            w.check_agreement()

    run_virtual(story())


def test_an_old_payload_that_is_announced_again_is_kept_with_the_newer_round(world):
    """When the old round's payloads are dropped everywhere, nobody could fetch it again."""

    async def story() -> None:
        async with world(2 * SNAPSHOT_EVERY + 4, 4) as w:
            for number in range(4):
                w.start(number)
            await w.until(lambda: w.newest() >= 4)
            liar, again = w.nodes[3], []

            def lie(body: Body) -> Body:
                if isinstance(body, Ack) and body.round == 2 * SNAPSHOT_EVERY - 1 and not again:
                    old = next(c for _, c in liar.driver.contributions._found.values() if c.round == 3)
                    again.append(old.payload)
                    asyncio.get_running_loop().call_soon(
                        liar.driver.guard.publish, msgspec.structs.replace(old, round=body.round + 1)
                    )
                return body

            corrupt(liar, lie)
            await w.until(lambda: the_others_finish(w, 3), 600.0)
            assert again
            w.check_agreement()

    run_virtual(story())


@pytest.mark.parametrize("first_is_sound", [True, False])
def test_a_member_that_contributes_many_times_to_a_round_counts_once_with_its_first(world, first_is_sound):
    """Whatever the first is: the others hold one set, fetch no more than it, and go on."""

    async def story() -> None:
        async with world(8, 4) as w:
            for number in range(4):
                w.start(number)
            await w.until(lambda: w.newest() >= 1)
            liar, said = w.nodes[3], []
            honest = liar.driver.net.publish

            def lie(body: Body) -> Body:
                if not isinstance(body, Contribution) or body.round < 4:
                    return body
                junk = [liar.swarm.blobs.store.add_bytes(bytes([n, body.round]) * 5) for n in range(20)]
                more = [msgspec.structs.replace(body, payload=blob) for blob in junk]
                wanted, *rest = [body, *more] if first_is_sound else [*more, body]
                said.extend(one.payload for one in rest)
                asyncio.get_running_loop().call_soon(lambda: [honest(one) for one in rest])
                return wanted

            corrupt(liar, lie)
            await w.until(lambda: the_others_finish(w, 3), 600.0)
            w.check_agreement()
            for node in list(w.nodes.values())[:3]:
                assert not any(node.swarm.blobs.store.has(blob) for blob in said)
                assert (liar.peer in node.driver.context.log.rows[6].contributors) == first_is_sound

    run_virtual(story())


@pytest.mark.parametrize("alone", [0, 2])
def test_a_member_with_two_histories_stops_nobody(world, alone):
    """Half of the others hold one contribution of it, half another one, and no feed takes both."""

    async def story() -> None:
        async with world(8, 4) as w:
            for number in range(4):
                w.start(number)
            await w.until(lambda: w.newest() >= 2)
            liar, others = w.nodes[3], [w.nodes[number] for number in range(3)]
            said = []

            publish = liar.driver.net.publish

            def lie(body: Body) -> Entry:
                """Two signed entries for one place, each for its part of the others; then nothing any more."""
                if not said and not isinstance(body, Contribution):
                    return publish(body)
                last = liar.swarm.ledger.head(liar.peer)
                made = sign_entry(w.spec.id, liar.identity, last.seq + 1, last.id, body)
                if not said:
                    other = msgspec.structs.replace(body, tokens=body.tokens + 1)
                    twin = sign_entry(w.spec.id, liar.identity, last.seq + 1, last.id, other)
                    for number, node in enumerate(others):
                        entry = twin if number == alone else made
                        node.swarm.replication._on_entry(liar.peer, encode_entry(entry))
                        said.append((body.payload, entry.id))
                return made

            liar.driver.net.publish = lie
            await w.until(lambda: said)
            await w.until(lambda: all(node.swarm.blobs.store.has(said[0][0]) for node in others))
            await w.kill(3)
            await w.until(lambda: the_others_finish(w, 3), 600.0)
            w.check_agreement()
            assert all(node.swarm.ledger.equivocators() == {liar.peer} for node in others)
            kept = {entry.id for node in others for entry in node.swarm.ledger.orphans()}
            assert kept <= {name for _, name in said}
            assert kept, "the final set names what some of them could get by name only"

    run_virtual(story())
