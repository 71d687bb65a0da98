"""Whole nodes on virtual time: who lost its home goes on in its own feed, or writes nothing."""

import asyncio
from types import SimpleNamespace

import pytest

from atoll.node.daemon.assets.feed_recovery import (
    SILENT_S,
    LostFeed,
    clear_mark,
    mark_restored,
    read_mark,
    wait_for_feed,
)
from atoll.p2p.ledger.store import LEDGER_FILE
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.errors import CorruptFault, LocalFault
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId

LOST = (LEDGER_FILE, f"{LEDGER_FILE}-wal", f"{LEDGER_FILE}-shm", "epoch", "peers.json")
ME = Identity(bytes(32)).peer_id


def lose(node, entries):
    """Its home is restored: the state is there, the ledger is not."""
    for name in LOST:
        (node.home / name).unlink(missing_ok=True)
    node.worker.pending = ()
    mark_restored(node.home, entries, {other.peer for other in node.world.nodes.values()} - {node.peer}, node.peer)


def entries_of(node, peer):
    return node.swarm.ledger.vector().get(peer, 0)


def forks(world):
    return {peer for node in world.nodes.values() if node.swarm for peer in node.swarm.ledger.equivocators()}


def test_who_lost_its_ledger_goes_on_in_its_own_feed(world):
    async def story() -> None:
        async with world(8, 3) as w:
            for number in range(3):
                w.start(number)
            await w.until(lambda: w.all_final(2))
            node = w.nodes[2]
            had = entries_of(w.nodes[0], node.peer)
            await w.kill(2)
            lose(node, 3)
            w.start(2)
            await w.until(w.all_final)
            w.check_agreement()
            assert forks(w) == set()
            assert entries_of(w.nodes[0], node.peer) > had
            assert max(node.worker.trained) == 7
            assert len(set(node.worker.trained)) == len(node.worker.trained)
            assert read_mark(node.home, node.peer) is None
            assert all(set(said) <= set(range(number)) for number, said in node.worker.said.items())
            assert any(node.worker.said.values()), "it is told of what it sent to rounds that are not final there"

    run_virtual(story())


def test_it_writes_nothing_while_nobody_has_its_feed(world):
    async def story() -> None:
        async with world(8, 2) as w:
            for number in range(2):
                w.start(number)
            await w.until(lambda: w.all_final(2))
            for number in range(2):
                await w.kill(number)
            node = w.nodes[1]
            lose(node, 3)
            w.start(1)
            await asyncio.sleep(200)
            assert "waiting for peers that have this node's feed" in node.driver.round.syncing
            assert entries_of(node, node.peer) == 0
            assert read_mark(node.home, node.peer) == LostFeed(3, frozenset({w.nodes[0].peer}))
            w.start(0)
            await w.until(w.all_final)
            w.check_agreement()
            assert forks(w) == set()

    run_virtual(story())


def test_one_neighbour_with_an_older_copy_is_not_enough(world):
    async def story() -> None:
        async with world(12, 3) as w:
            for number in range(3):
                w.start(number)
            await w.until(lambda: w.all_final(2))
            await w.kill(1)
            await w.until(lambda: w.all_final(4))
            node = w.nodes[2]
            had = entries_of(w.nodes[0], node.peer)
            await w.kill(2)
            lose(node, 3)
            await w.kill(0)
            w.start(1)
            w.start(2)
            await asyncio.sleep(100)
            assert 3 <= entries_of(node, node.peer) < had, "the older copy came, and nothing was added to it"
            assert "1 of 2 other members told what they have, 2 must" in node.driver.round.syncing
            w.start(0)
            await w.until(w.all_final)
            w.check_agreement()
            assert forks(w) == set()
            assert read_mark(node.home, node.peer) is None

    run_virtual(story())


class Waiting:
    """What `wait_for_feed` looks at, second by second."""

    def __init__(self, entries=5, outrun_at_s=None, others=(), told_at_s=None, here=()):
        self.now_s = 0.0
        self._entries, self._outrun_at_s, self.here = entries, outrun_at_s, list(here)
        self.ledger = SimpleNamespace(vector=lambda: {ME: self._entries})
        self.others, self._told_at_s = frozenset(others), {PeerId("any"): 0.0} if told_at_s is None else told_at_s
        self.said, self.dialled = [], []
        self.replication = SimpleNamespace(anti_entropy=self)

    async def connect(self, peer):
        self.dialled.append(peer)

    def synced_peers(self):
        """Each of a story is a neighbour for ten seconds; `any` stays."""
        told = self._told_at_s.items()
        return frozenset(peer for peer, at_s in told if at_s <= self.now() < at_s + (10 if peer != "any" else 1e9))

    def neighbours(self):
        return [*self.synced_peers(), *self.here]

    @property
    def registers(self):
        return SimpleNamespace(echoes=1 + (self._outrun_at_s is not None and self.now() >= self._outrun_at_s))

    def sync_soon(self):
        pass

    def now(self):
        return asyncio.get_running_loop().time()

    def run(self, entries=5, limit_s=1000.0, lease_s=20.0):
        async def wait():
            began = self.now()
            async with asyncio.timeout(limit_s):
                await wait_for_feed(self, ME, LostFeed(entries, self.others), lease_s, self.now, self.said.append)
            return self.now() - began

        return run_virtual(wait())


def test_it_listens_for_a_lease_after_all_neighbours_told_what_they_have():
    assert Waiting().run() == pytest.approx(20.0, abs=1.0)
    assert Waiting(told_at_s={PeerId("any"): 30.0}).run() == pytest.approx(50.0, abs=1.0)


def test_neither_strangers_nor_silent_members_hold_it_for_ever():
    a, b = others = [PeerId("a"), PeerId("any")]
    strangers = [PeerId(f"stranger {number}") for number in range(3)]
    assert Waiting(others=[b], here=strangers).run() == pytest.approx(20.0, abs=1.0)
    # A silent one of the members may have more of the feed: it is waited for, and then no longer.
    silent = Waiting(others=[*others, PeerId("any")], here=[a, *strangers])
    silent._told_at_s = {PeerId("any"): 0.0, PeerId("c"): 0.0}
    silent.others = frozenset((a, b, PeerId("c")))
    assert silent.run() == pytest.approx(SILENT_S + 20.0, abs=2.0)
    # Without a name it is who is connected when the listening begins, and not who dials anew.
    assert Waiting(here=strangers).run() == pytest.approx(SILENT_S, abs=2.0)


def test_a_feed_that_is_shorter_than_it_was_is_not_enough():
    waiting = Waiting(entries=4)
    with pytest.raises(TimeoutError):
        waiting.run()
    assert len(set(waiting.said)) == 1


def test_more_than_half_of_the_others_must_tell():
    a, b, c, d = others = [PeerId(name) for name in "abcd"]
    assert Waiting(others=others, told_at_s={a: 0, c: 20, b: 50}).run() == pytest.approx(70.0, abs=2.0)
    waiting = Waiting(others=others, told_at_s={a: 0, b: 5, PeerId("stranger"): 0})
    with pytest.raises(TimeoutError):
        waiting.run()
    assert {*waiting.dialled[6:]} == {c, d}
    assert "2 of 4 other members told what they have, 3 must" in waiting.said[-1]
    assert "--from-checkpoint" in waiting.said[-1]


@pytest.mark.parametrize(("lease_s", "at_s"), [(20.0, 10.0), (20.0, 19.5), (2.0, 1.5), (1.0, 0.2), (1.0, 2.9)])
def test_an_identity_that_is_in_use_is_refused(lease_s, at_s):
    with pytest.raises(LocalFault, match="another node that runs has this identity"):
        Waiting(outrun_at_s=at_s).run(lease_s=lease_s)


def test_a_mark_is_a_number_and_peers_or_damaged(tmp_path):
    assert read_mark(tmp_path, ME) is None
    others = frozenset(Identity(number.to_bytes(32)).peer_id for number in range(300))
    for lost in (LostFeed(12, others), LostFeed(0, frozenset())):
        mark_restored(tmp_path, *lost, ME)
        assert read_mark(tmp_path, ME) == lost
        assert read_mark(tmp_path, Identity(bytes([7]) * 32).peer_id) is None, "another identity lost nothing"
    for mark in (f"12\n{ME}\n", f"12 \n{ME}\n"):
        (tmp_path / "restored").write_text(mark)  # of an older version, or of an identity that was not known
        assert read_mark(tmp_path, ME) == LostFeed(12, frozenset({ME}))
    for damage in ("x", "", "1\nsomebody\n", "\xff"):
        (tmp_path / "restored").write_text(damage)
        with pytest.raises(CorruptFault):
            read_mark(tmp_path, ME)
    clear_mark(tmp_path)
    clear_mark(tmp_path)
    assert read_mark(tmp_path, ME) is None
