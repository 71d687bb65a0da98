"""Whole nodes in an open run with a puzzle: who solved it trains along, who did not gets no room in any ledger."""

from msgspec.structs import replace

from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Round
from atoll.protocols.ledger.records import Leave, Solved, sign_entry
from atoll.protocols.run.admission import AdmissionSpec

BITS = 12


def with_puzzle(spec):
    return replace(spec, admission=AdmissionSpec(puzzle_bits=BITS))


def test_newcomers_solve_it_by_themselves_and_made_up_identities_get_no_room(world):
    async def story() -> None:
        async with world(16, 3, adjust=with_puzzle) as w:
            for number in range(3):
                w.start(number)
            await w.until(lambda: w.nodes[0].worker.final >= 3)
            ledger = w.nodes[0].swarm.ledger
            made_up = [Identity(bytes([99, number]) * 16) for number in range(40)]
            flood = [sign_entry(w.spec.id, who, 0, b"", Leave(Round(0))) for who in made_up]
            assert not ledger.insert_all(flood, made_up[0].peer_id).fresh
            w.start(3)
            await w.until(lambda: w.nodes[3].peer in w.nodes[0].driver.finality.voters)
            await w.kill(3)
            w.start(3)  # it has its feed, and solves nothing again
            await w.until(lambda: w.nodes[0].worker.final >= 12)
            w.check_agreement()
            assert {*ledger.vector()} == {w.nodes[number].peer for number in range(4)}
            solved = [entry.author for entry in ledger.entries(kind=Solved)]
            assert sorted(solved) == sorted(w.nodes[number].peer for number in range(4) if number)

    run_virtual(story())
