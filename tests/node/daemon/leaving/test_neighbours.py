"""Which neighbours of a leaving node stay."""

from types import SimpleNamespace

from atoll.node.daemon.leaving.neighbours import SwarmNeighbours
from atoll.node.daemon.swarm_adapter import SwarmNetwork
from atoll.p2p.transports.memory.memory_network import MemoryNetwork
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Round
from atoll.protocols.ledger.records import Follow, Leave
from atoll.protocols.ledger.registers import Lease

ME = Identity(bytes(32)).peer_id
PEERS = [Identity(bytes([number]) * 32).peer_id for number in range(1, 6)]


def staying(leases, *, newest, fresh=(), without=(), connected=PEERS):
    """Who stays. `newest`: each author's newest body; `fresh`: entries that the driver did not read."""
    entries = [(cursor, SimpleNamespace(author=peer, body=body)) for cursor, (peer, body) in enumerate(fresh)]
    held = {peer: Lease(activity, Round(3), Round(2), b"", Round(-1), 1.0) for peer, activity in leases.items()}
    swarm = SimpleNamespace(
        ledger=SimpleNamespace(
            since=lambda cursor: entries,
            head=lambda peer: SimpleNamespace(body=newest[peer]) if peer in newest else None,
        ),
        registers=SimpleNamespace(live=lambda kind, now: held, expires=lambda *key: 10.0),
        neighbours=lambda: connected,
    )
    net = SwarmNetwork(swarm, MemoryNetwork(seed=1).host(ME), ME, lambda: 5.0)
    return set(SwarmNeighbours(swarm, net).staying(without))


def test_who_left_does_not_stay_also_while_it_renews_its_lease():
    left, work = Leave(Round(2)), Follow(Round(2), b"")
    newest = {PEERS[0]: left, PEERS[1]: left, PEERS[2]: work, PEERS[3]: left}
    leases = dict(zip(PEERS, ["leaving", "observing", "paused", "training", "leaving"], strict=True))
    found = staying(leases, newest=newest, fresh=[(PEERS[3], left)])
    assert found == {PEERS[1], PEERS[2]}, "the second one is back, the third one rests, the last one wrote nothing"
    assert staying(leases, newest=newest, without=PEERS[:2]) == {PEERS[2], PEERS[3]}
    assert staying(leases, newest={}, connected=PEERS[:2]) == {PEERS[1]}
    assert staying(leases, newest={}, fresh=[(PEERS[3], left), (PEERS[3], work)]) == set(PEERS[1:4])
