"""Whole nodes in a run by invitation: who is not admitted stops training and says why."""

from msgspec.structs import replace

from atoll.node.daemon.rounds.queries import reason
from atoll.node.daemon.rounds.state import Phase
from atoll.p2p.exchange.sync import Exchange
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.identity import Identity
from atoll.protocols.run.admission import AdmissionSpec, make_token
from atoll.protocols.run.invite import make_invite, read_invite

OWNER = Identity(bytes([1]) * 32)
PLACES = 2
FAR_S = 1_000_000


def by_invitation(spec):
    return replace(spec, admission=AdmissionSpec(mode="invite"))


def test_whose_permit_is_used_up_trains_no_further_round(world):
    async def story() -> None:
        async with world(40, 2, adjust=by_invitation) as w:
            token = make_token(w.spec.id, OWNER, bytes(32), FAR_S, "friends", PLACES)
            w.invite = read_invite(make_invite(OWNER, w.spec.id, (), FAR_S, token, b""))
            for number in range(1 + PLACES):
                w.start(number)
            await w.until(lambda: w.nodes[0].worker.final >= 4)
            node = w.start(1 + PLACES)
            await w.until(lambda: w.nodes[0].worker.final >= 12)
            assert node.driver.round.phase is Phase.PAUSED
            assert "waiting to be admitted: the permit" in reason(node.driver.round)
            trained = list(node.worker.trained)
            assert len(trained) <= 2, "the round at hand when it was told"
            first = w.nodes[0].worker.final
            await w.until(lambda: min(each.worker.final for each in w.nodes.values()) >= first + 10)
            assert node.worker.trained == trained, "it follows the run, and trains nothing"
            assert node.peer not in w.nodes[0].swarm.ledger.vector()
            assert not any(each.driver.round.refused for each in w.nodes.values() if each is not node)
            w.check_agreement()

    run_virtual(story())


def test_strangers_stop_no_member_that_is_alone(world):
    async def story() -> None:
        async with world(40, 2) as w:
            for number in range(2):
                w.start(number)
            await w.until(lambda: w.all_final(2))
            await w.stop(1)
            alone, stranger = w.nodes[0], Identity(bytes([9]) * 32).peer_id
            words = {"closed": False, "forked": (), "entries": (), "proofs": ()}
            alone.swarm.replication._on_told(stranger, Exchange({}, **words, refusal="this run is mine"))
            first = alone.worker.final
            await w.until(lambda: alone.worker.final >= first + 10)
            assert alone.swarm.replication.refusal == "this run is mine"
            assert alone.driver.net.refusal() == ""
            alone.driver.net._excluded.add(alone.peer)
            assert alone.driver.net.refusal() == "this run is mine"

    run_virtual(story())
