"""When a newcomer with an empty ledger begins."""

import asyncio
from contextlib import contextmanager
from types import SimpleNamespace

from atoll.node.daemon.assets.first_records import LIMIT_S, wait_for_records
from atoll.p2p.system.waiting import Notifier
from atoll.p2p.transports.memory.virtual_time import run_virtual


class Newcomer:
    """One whose first exchange brought these entries; leases are pairs of activity and final round."""

    def __init__(self, *leases, entries=0):
        self.vector, self.caught_up = {"author": entries} if entries else {}, False
        self.leases = [SimpleNamespace(activity=activity, final=final) for activity, final in leases]
        self.changes = Notifier()
        self.repair = SimpleNamespace(is_caught_up=lambda: self.caught_up, on_exchange=lambda: None)
        self.swarm = SimpleNamespace(
            ledger=SimpleNamespace(vector=lambda: self.vector),
            replication=SimpleNamespace(anti_entropy=self.repair),
            subscribed=self.subscribed,
        )

    @contextmanager
    def subscribed(self):
        yield self.changes

    def begins_after(self, story=None):
        """Seconds until it begins; `story` runs meanwhile."""

        async def main():
            loop = asyncio.get_running_loop()
            async with asyncio.TaskGroup() as group:
                if story is not None:
                    group.create_task(story())
                await wait_for_records(self.swarm, lambda: self.leases)
                return round(loop.time(), 2)

        before = self.repair.on_exchange
        after_s = run_virtual(main())
        assert self.repair.on_exchange is before, "nobody waits any more"
        return after_s


def test_with_records_or_in_a_run_that_begins_it_waits_for_nothing():
    assert Newcomer(entries=5).begins_after() == 0.0
    assert Newcomer(("training", -1), ("syncing", -1)).begins_after() == 0.0


def test_it_waits_for_a_whole_exchange_with_who_has_records():
    for leases in ([], [("syncing", -1)], [("training", 7)]):
        newcomer = Newcomer(*leases)

        async def come(newcomer=newcomer):
            await asyncio.sleep(1.0)
            newcomer.vector = {"author": 5}  # by gossip
            newcomer.changes.notify()
            await asyncio.sleep(1.05)
            newcomer.caught_up = True  # which changes nothing of the ledger
            newcomer.repair.on_exchange()

        assert newcomer.begins_after(come) == 2.05, "at once"


def test_it_waits_no_longer_than_so_though_nobody_has_any_or_a_lease_lies():
    for leases in ([], [("syncing", -1)], [("training", 10**9)]):
        assert Newcomer(*leases).begins_after() == LIMIT_S
