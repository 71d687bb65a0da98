"""Whole nodes on virtual time: who lost its home goes on in its own feed, or writes nothing."""

import asyncio
from types import SimpleNamespace

import pytest

from atoll.node.restored_feed import mark, marked, unmark, wait_for_feed
from atoll.p2p.ledger.store import LEDGER
from atoll.p2p.transports.virtual_time import run_virtual
from atoll.protocols.errors import CorruptFault, LocalFault
from atoll.protocols.ids import PeerId

LOST = (LEDGER, f"{LEDGER}-wal", f"{LEDGER}-shm", "epoch", "peers.json")
ME = PeerId("me")


def lose(node, entries):
    """Its home is restored: the state is there, the ledger is not."""
    for name in LOST:
        (node.home / name).unlink(missing_ok=True)
    node.worker.pending = ()
    mark(node.home, entries)


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
            assert marked(node.home) is None
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
            assert marked(node.home) == 3
            w.start(0)
            await w.until(w.all_final)
            w.check_agreement()
            assert forks(w) == set()

    run_virtual(story())


class Waiting:
    """What `wait_for_feed` looks at, second by second."""

    def __init__(self, entries=5, neighbours_are_slow_s=0.0, outrun_at_s=None):
        self.now_s = 0.0
        self._entries, self._slow_s, self._outrun_at_s = entries, neighbours_are_slow_s, outrun_at_s
        self.ledger = SimpleNamespace(vector=lambda: {ME: self._entries})
        self.said = []

    @property
    def registers(self):
        return SimpleNamespace(echoes=1 + (self._outrun_at_s is not None and self.now() >= self._outrun_at_s))

    def repair_soon(self):
        pass

    def is_abreast(self):
        return self.now() >= self._slow_s

    def now(self):
        return asyncio.get_running_loop().time()

    def run(self, entries=5, limit_s=1000.0):
        async def wait():
            began = self.now()
            async with asyncio.timeout(limit_s):
                await wait_for_feed(self, ME, entries, 20.0, self.now, self.said.append)
            return self.now() - began

        return run_virtual(wait())


def test_it_listens_for_a_lease_after_all_neighbours_told_what_they_have():
    assert Waiting().run() == pytest.approx(20.0, abs=1.0)
    assert Waiting(neighbours_are_slow_s=30.0).run() == pytest.approx(50.0, abs=1.0)


def test_a_feed_that_is_shorter_than_it_was_is_not_enough():
    waiting = Waiting(entries=4)
    with pytest.raises(TimeoutError):
        waiting.run()
    assert len(set(waiting.said)) == 1


def test_an_identity_that_is_in_use_is_refused():
    with pytest.raises(LocalFault, match="another node that runs has this identity"):
        Waiting(outrun_at_s=10.0).run()


def test_a_mark_is_a_number_or_damaged(tmp_path):
    assert marked(tmp_path) is None
    mark(tmp_path, 12)
    assert marked(tmp_path) == 12
    (tmp_path / "restored").write_text("x")
    with pytest.raises(CorruptFault):
        marked(tmp_path)
    unmark(tmp_path)
    unmark(tmp_path)
    assert marked(tmp_path) is None
