"""Whole nodes on virtual time: whose ledger is gone signs no second history; who never signed begins at once."""

import asyncio
from contextlib import suppress

import pytest
from msgspec.structs import replace

from atoll.node.daemon.assets.feed_recovery import LostFeed, read_mark
from atoll.node.daemon.consensus import machine
from atoll.p2p.exchange import floors, sync
from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.ledger import signers
from atoll.p2p.ledger.signers import SIGNERS_FILE, Signers
from atoll.p2p.ledger.store import LEDGER_FILE
from atoll.p2p.membership import register_sync
from atoll.p2p.rpc.calls import Calls
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.errors import AtollError, DiskFault
from atoll.protocols.identity import Identity
from atoll.protocols.run.sections.history import HistorySpec

WAITS = "this home was restored or lost its ledger: waiting for peers that have this node's feed"


def move_ledger_away(node):
    for file in node.home.glob(f"{LEDGER_FILE}*"):
        file.unlink()


def entries_of(node, peer):
    return node.swarm.ledger.vector().get(peer, 0)


def forks(world):
    return {peer for node in world.nodes.values() if node.swarm for peer in node.swarm.ledger.equivocators()}


ANSWERS = {
    sync.METHOD: (sync.Exchange, sync.Exchange({}, False, (), (), ()), sync.MESSAGE_BYTES),
    register_sync.METHOD: (
        register_sync.KnownVersions, register_sync.RegisterBatch(()), register_sync.MESSAGE_BYTES
    ),
    floors.METHOD: (floors.FloorsQuery, floors.FeedFloors({}, ()), floors.MESSAGE_BYTES),
}  # fmt: skip
"""Of a peer that is as new as anybody can be: what it is asked, its answer, largest message in bytes."""


async def pong(peer, request):
    return request


async def empty_peer(world, number):
    """It dials a node until cancelled."""
    host = world.network.host(Identity(bytes([200]) * 32).peer_id)
    calls = Calls(host, world.spec.id, on_fault=lambda *fault: None)
    calls.register("ping", bytes, bytes, pong, max_bytes=64)
    for name, (asked, answer, size) in ANSWERS.items():

        async def reply(peer, request, answer=answer):
            return answer

        calls.register(name, asked, type(answer), reply, max_bytes=size)
    async with asyncio.TaskGroup() as group:
        up = asyncio.Event()
        group.create_task(host.serve(up.set))
        await up.wait()
        group.create_task(calls.serve())
        while True:
            victim = world.hosts[number]
            with suppress(AtollError):
                await host.connect(PeerAddress(victim.peer_id, (victim.maddr,)))
            await asyncio.sleep(0.05)


async def alone_without_ledger(w):
    """Member 1 of three, all of which are down; its ledger is gone."""
    await members(w)
    for number in range(3):
        await w.kill(number)
    move_ledger_away(w.nodes[1])
    return w.nodes[1]


async def members(w, final=3):
    for number in range(3):
        w.start(number)
    await w.until(lambda: w.all_final(final))


def test_who_lost_its_ledger_signs_nothing_beside_a_peer_that_has_none(world):
    async def story() -> None:
        async with world(12, 3) as w:
            await members(w)
            node = w.nodes[1]
            for number in range(3):
                await w.kill(number)
            had = entries_of(w.nodes[0], node.peer)
            move_ledger_away(node)
            w.start(1)
            stranger = asyncio.get_running_loop().create_task(empty_peer(w, 1))
            await asyncio.sleep(60)
            assert node.swarm.replication.anti_entropy.synced.is_set(), "with the peer that has nothing"
            assert entries_of(node, node.peer) == 0
            assert node.driver.round.syncing.startswith(
                f"{WAITS}; 0 of 2 other members told what they have, 2 must"
            )
            assert "move identity.key away" in node.driver.round.syncing
            for number in (0, 2):
                w.start(number)
            await w.until(w.all_final)
            stranger.cancel()
            assert forks(w) == set()
            assert entries_of(w.nodes[0], node.peer) > had
            assert max(node.worker.trained) == 11
            assert read_mark(node.home, node.peer) is None
            w.check_agreement()
            await w.check_feeds()

    run_virtual(story())


@pytest.mark.parametrize("is_old", [False, True])
def test_alone_it_waits_for_the_members_that_it_knows_also_after_another_start(world, is_old):
    async def story() -> None:
        async with world(12, 3) as w:
            node = await alone_without_ledger(w)
            if is_old:  # a home that a version without this file left
                (node.home / SIGNERS_FILE).unlink()
            for _ in range(2):
                w.start(1)
                await asyncio.sleep(100)
                assert entries_of(node, node.peer) == 0
                assert WAITS in node.driver.round.syncing
                await w.kill(1)
            others = frozenset({w.nodes[0].peer, w.nodes[2].peer})
            assert read_mark(node.home, node.peer) == LostFeed(1, others)

    run_virtual(story())


def test_a_home_of_an_older_version_is_noted_at_its_next_start(world):
    async def story() -> None:
        async with world(12, 3) as w:
            await members(w)
            node = w.nodes[1]
            await w.kill(1)
            (node.home / SIGNERS_FILE).unlink()
            w.start(1)
            await asyncio.sleep(0.1)
            assert node.peer in Signers(node.home)

    run_virtual(story())


@pytest.mark.parametrize("gone", [(), (LEDGER_FILE,), ("epoch",), ("leases", LEDGER_FILE), ("rounds.jsonl",)])
def test_a_start_that_was_killed_before_its_first_entry_locks_nobody_out(world, gone):
    async def story() -> None:
        async with world(8, 1) as w:
            for after_s in (0.0, 0.001, 0.05):  # in this world the first entry comes after a round of ten seconds
                node = w.start(0)
                await asyncio.sleep(after_s)
                await w.kill(0)
                assert node.swarm is None or entries_of(node, node.peer) == 0
            for name in gone:
                for file in node.home.glob(f"{name}*"):
                    file.unlink()
            w.start(0)
            await w.until(lambda: entries_of(node, node.peer) > 0, 30)
            assert read_mark(node.home, node.peer) is None

    run_virtual(story())


def test_a_member_that_never_signed_begins_though_it_was_here_for_long_and_its_ledger_is_gone(world):
    """It has been started often, and saw final sets and leases of others."""

    async def story() -> None:
        async with world(12, 2) as w:
            for number in range(2):
                w.start(number)
            late = w.start(2, train_s=1e6)
            await w.until(lambda: w.nodes[0].worker.final >= 3 and w.nodes[1].worker.final >= 3)
            await asyncio.sleep(60)
            assert entries_of(late, late.peer) == 0
            assert [path.name for path in late.home.iterdir() if path.name in ("leases", "epoch")]
            await w.kill(2)
            move_ledger_away(late)
            w.start(2)
            await asyncio.sleep(60)
            assert read_mark(late.home, late.peer) is None
            assert late.driver.finalizer.is_synced

    run_virtual(story())


def test_a_new_identity_in_a_home_that_lost_its_ledger_begins_at_once(world):
    async def story() -> None:
        async with world(12, 3) as w:
            node = await alone_without_ledger(w)
            w.start(1)
            await asyncio.sleep(20)
            assert WAITS in node.driver.round.syncing
            await w.kill(1)
            old = node.peer
            node.identity = Identity(bytes([77]) * 32)
            node.peer = node.identity.peer_id
            node.task = w._group.create_task(node.live())
            for number in (0, 2):
                w.start(number)
            await w.until(lambda: node.driver.finalizer.is_synced, 60)
            assert read_mark(node.home, old) is not None
            assert read_mark(node.home, node.peer) is None

    run_virtual(story())


def test_an_entry_leaves_this_node_after_its_author_is_noted(world, monkeypatch):
    async def story() -> None:
        async with world(8, 1) as w:
            node = w.start(0)
            await asyncio.sleep(0.1)
            order = []
            gossip, note = node.swarm.replication._gossip, node.swarm.ledger.signers.note
            append = node.swarm.ledger._write

            def written(*given):
                order.append("written")
                return append(*given)

            def noted(author):
                assert node.swarm.ledger._db.rows("SELECT count(*) FROM entries")[0][0] > 0
                order.append("noted")
                note(author)

            monkeypatch.setattr(node.swarm.ledger, "_write", written)
            monkeypatch.setattr(node.swarm.ledger.signers, "note", noted)
            monkeypatch.setattr(gossip, "publish", lambda kind, *given: kind == "entry" and order.append("sent"))
            await w.until(lambda: len(order) >= 3, 60)
            assert order[:3] == ["written", "noted", "sent"]

    run_virtual(story())


def test_a_full_disk_loses_no_entry_and_the_next_start_notes_its_author(world, monkeypatch):
    async def story() -> None:
        async with world(8, 1) as w:
            node = w.start(0)

            def full(path, data):
                raise DiskFault("no space is left")

            with monkeypatch.context() as disk:
                disk.setattr(signers, "write_whole", full)
                await asyncio.sleep(0.1)
                await w.until(lambda: entries_of(node, node.peer) > 0, 60)
                await w.kill(0)
            assert not (node.home / SIGNERS_FILE).exists()
            w.start(0)
            await asyncio.sleep(0.1)
            assert node.peer in Signers(node.home), "the start noted it"
            assert read_mark(node.home, node.peer) is None

    run_virtual(story())


def test_a_summary_brings_its_feed_back_where_no_peer_has_the_records_before_it(world, monkeypatch):
    monkeypatch.setattr(machine, "DECIDED_KEPT", 24)

    async def story() -> None:
        async with world(400, 4, adjust=lambda spec: replace(spec, history=HistorySpec(every=8))) as w:
            for number in range(4):
                w.start(number, recent=(24, 8))
            await w.until(lambda: all(node.worker.final >= 60 for node in w.nodes.values()))
            node = w.nodes[3]
            await w.kill(3)
            move_ledger_away(node)
            had, first = entries_of(w.nodes[0], node.peer), w.nodes[0].worker.final
            w.start(3)
            await w.until(lambda: node.worker.final >= first + 8 and max(node.worker.trained) > first + 4, 400)
            assert not forks(w)
            assert entries_of(w.nodes[0], node.peer) > had
            assert read_mark(node.home, node.peer) is None
            w.check_agreement()

    run_virtual(story())
