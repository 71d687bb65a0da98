"""A node that may train at night only, in a swarm: it rests, still folds and votes, and goes on by itself."""

import asyncio
import json
from datetime import datetime, timedelta

from atoll.node.config.guest import GuestConfig, read_guest
from atoll.node.daemon.rounds.queries import reason
from atoll.node.daemon.rounds.state import Phase
from atoll.node.guest.watch import GuestWatch
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.ledger.registers import Lease
from tests.node.guest.test_watch import Machine

ROUNDS, MEMBERS = 40, 3
REST_S = 120.0
"""How long after its start the guest's hours begin again."""


def test_a_guest_rests_outside_its_hours_and_goes_on_at_their_begin(world):
    async def story() -> None:
        async with world(ROUNDS, MEMBERS) as w:
            for number in range(MEMBERS):
                w.start(number)
            await w.until(lambda: w.all_final(2))
            guest, others = w.nodes[2], (w.nodes[0], w.nodes[1])
            loop = asyncio.get_running_loop()
            began, first = loop.time(), w.newest()
            watch = GuestWatch(
                read_guest(GuestConfig(hours="22:00-21:00")),
                Machine(),
                guest.driver.hold,
                lambda: datetime(2026, 3, 9, 21, 58) + timedelta(seconds=loop.time() - began),
            )
            task = loop.create_task(watch.serve())
            await w.until(lambda: guest.driver.round.phase is Phase.PAUSED, limit_s=60.0)
            said = "outside its hours (22:00 to 21:00); goes on at 22:00"
            assert reason(guest.driver.round) == said
            await w.until(lambda: w.nodes[0].swarm.live(Lease)[guest.peer].activity == "paused")
            rested = guest.worker.final
            await w.until(lambda: min(node.worker.final for node in others) >= first + 4)
            assert loop.time() - began < REST_S, "the others do not wait for it"
            await w.until(lambda: guest.worker.final >= rested + 3, limit_s=30.0)
            assert guest.driver.round.phase is Phase.PAUSED, "what it folded is the others' work"
            await w.until(lambda: guest.driver.round.phase is Phase.TRAIN, limit_s=REST_S)
            assert 0 <= loop.time() - began - REST_S < 30.0
            await w.until(lambda: w.all_final())
            task.cancel()
            w.check_agreement()
            lines = map(json.loads, (guest.home / "events.jsonl").read_text().splitlines())
            assert [line["reason"] for line in lines if line["event"] == "held"] == [said, ""]
            rows = guest.driver.context.log.rows.values()
            without = [row.round for row in rows if row.final and guest.peer not in row.contributors]
            assert 4 <= len(without) <= 16
            assert guest.peer in max(rows, key=lambda row: row.round).contributors

    run_virtual(story())


def test_the_users_own_pause_wins(world):
    async def story() -> None:
        async with world(ROUNDS, 1) as w:
            node = w.start(0)
            await w.until(lambda: w.all_final(1))
            node.driver.hold("hot")
            await w.until(lambda: node.driver.round.phase is Phase.PAUSED)
            node.driver.pause("by the user")
            node.driver.hold("")
            await asyncio.sleep(60.0)
            assert (node.driver.round.phase, reason(node.driver.round)) == (Phase.PAUSED, "by the user")
            node.driver.hold("hot")
            node.driver.resume()
            await asyncio.sleep(60.0)
            assert (node.driver.round.phase, reason(node.driver.round)) == (Phase.PAUSED, "hot")
            node.driver.hold("")
            await w.until(lambda: w.all_final())

    run_virtual(story())
