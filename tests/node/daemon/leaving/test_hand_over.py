"""A leaving node counts on nobody that leaves too, and stays within its bounds. Virtual time."""

import asyncio
import logging

import pytest

from atoll.node.daemon.leaving import hand_over as module
from atoll.node.daemon.leaving.hand_over import HandOver
from atoll.node.daemon.leaving.holders import IN_VAIN_S, LONGEST_S, STILL_S, Needs
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.ledger.registers import Lease

A, B, KEEPER = map(PeerId, ("a", "b", "keeper"))
BLOB = Digest(bytes(32))
NEEDS = Needs(Round(6), {6: frozenset({BLOB})})
SNAPSHOT = bytes([1]) * 32


def lease(final, number=7, snapshot=SNAPSHOT):
    return Lease("training", Round(number), Round(final), snapshot, Round(final), 0.0)


class Swarm:
    """Ledgers and leases of a few nodes. `rtt_s`: seconds of an exchange; its answer is of its middle."""

    def __init__(self, **leases):
        self.leases = {PeerId(peer): held for peer, held in leases.items()}
        self.gone = set()
        """Nodes that ended: nobody is connected to them."""
        self.knows_left = {peer: set() for peer in self.leases}
        """By node, whose Leave its ledger has."""
        self.holds = {peer: set() for peer in self.leases}
        self.rtt_s, self.mute, self.up = 1.0, set(), 0

    def view(self, me):
        return View(self, me)


class View:
    def __init__(self, swarm, me):
        self.swarm, self.me = swarm, me

    def staying(self, without):
        away = {self.me, *without, *self.swarm.gone, *self.swarm.knows_left[self.me]}
        return {peer: found for peer, found in self.swarm.leases.items() if peer not in away}

    def neighbours(self):
        return [peer for peer in self.swarm.leases if peer not in {self.me, *self.swarm.gone}]

    async def tell(self, peer):
        known = self.swarm.knows_left
        await asyncio.sleep(self.swarm.rtt_s / 2)
        if peer in self.swarm.gone or peer in self.swarm.mute:
            await asyncio.sleep(self.swarm.rtt_s / 2)
            return False
        known[peer] |= known[self.me]
        answer = set(known[peer])
        await asyncio.sleep(self.swarm.rtt_s / 2)
        known[self.me] |= answer
        return True

    async def offers_whole(self, peer, blob):
        await asyncio.sleep(self.swarm.rtt_s)
        return blob in self.swarm.holds[peer]

    def blob_bytes_up(self):
        return self.swarm.up


class Log:
    def __init__(self):
        self.events = []

    def event(self, name, **more):
        self.events.append(name)


def leave(swarm, me, needs=NEEDS, voters=(A, B), text=()):
    """The hand-over of a node that has just written its Leave, and its log."""
    swarm.knows_left[me].add(me)
    log = Log()
    task = HandOver(
        needs=needs, text=text, voters=voters, left=(), net=swarm.view(me), renew_lease=lambda: None, log=log
    )
    return task, log


async def timed(task):
    now = asyncio.get_running_loop().time
    began_s = now()
    done = await task.run()
    return done, now() - began_s


@pytest.mark.parametrize("apart_s", [0.0, 0.3, 0.7, 1.5])
def test_two_that_leave_in_one_moment_do_not_count_on_each_other(apart_s):
    async def story():
        swarm = Swarm(a=lease(6), b=lease(6), keeper=lease(3))
        swarm.rtt_s = 2.0

        async def end(peer, after_s):
            await asyncio.sleep(after_s)
            done, _ = await timed(leave(swarm, peer)[0])
            swarm.gone.add(peer)
            return done

        async with asyncio.TaskGroup() as group:
            ends = [group.create_task(end(A, 0.0)), group.create_task(end(B, apart_s))]
            await asyncio.sleep(60.0)
            assert len(swarm.gone) < 2, "nobody that stays has the model"
            swarm.leases[KEEPER] = lease(6)
        assert [each.result() for each in ends] == [True, True]

    run_virtual(story())


def test_who_counts_on_another_knows_that_this_one_knows_of_its_leave():
    async def story():
        swarm = Swarm(a=lease(6), b=lease(6), keeper=lease(3))
        assert await leave(swarm, A)[0].run(), "the other one stays, and has it"
        assert A in swarm.knows_left[B]

    run_virtual(story())


def test_a_neighbour_that_does_not_take_the_ledger_has_nothing():
    async def story():
        swarm = Swarm(a=lease(6), b=lease(6))
        swarm.mute.add(B)
        task, _ = leave(swarm, A)
        assert await timed(task) == (False, pytest.approx(STILL_S, abs=1.0))

    run_virtual(story())


def test_it_ends_when_the_bound_is_over_and_says_what_the_others_wait_for(caplog):
    async def story():
        swarm = Swarm(a=lease(6), keeper=lease(3))
        task, log = leave(swarm, A)
        with caplog.at_level(logging.WARNING):
            assert await timed(task) == (False, pytest.approx(STILL_S + 1.0, abs=1.5))
        assert log.events == ["hands_on", "handed_over"]
        said, ended = caplog.messages
        assert said.startswith(
            "nobody else has the model of round 6 yet: this node ends as soon as a member has it"
        )
        assert ended == (
            "ends, and nobody else has the model of round 6: the others wait for it until this node is back"
        )

    run_virtual(story())


def test_while_somebody_fetches_it_waits_longer_but_not_for_ever():
    async def story():
        swarm = Swarm(a=lease(6), keeper=lease(3))

        async def fetch():
            while True:
                await asyncio.sleep(10.0)
                swarm.up += 1

        async with asyncio.TaskGroup() as group:
            fetching = group.create_task(fetch())
            task, _ = leave(swarm, A)
            assert await timed(task) == (False, pytest.approx(LONGEST_S, abs=1.0))
            fetching.cancel()

    run_virtual(story())


def test_it_ends_at_once_where_the_next_voters_have_all_of_it():
    async def story():
        swarm = Swarm(a=lease(6), b=lease(5, snapshot=b""), keeper=lease(3))
        swarm.holds[B].add(BLOB)
        swarm.rtt_s = 0.1
        task, log = leave(swarm, A)
        done, took_s = await timed(task)
        assert done
        assert took_s < 0.5
        assert log.events == []

    run_virtual(story())


def test_it_waits_for_nobody_where_nobody_stays():
    async def story():
        swarm = Swarm(a=lease(6), b=lease(6))
        swarm.knows_left[A].add(B)
        task, _ = leave(swarm, A)
        assert await timed(task) == (True, pytest.approx(swarm.rtt_s))
        assert A in swarm.knows_left[B], "it may be back first"

    run_virtual(story())


def test_text_that_nobody_fetches_is_named_and_not_waited_for(caplog):
    async def story():
        swarm = Swarm(a=lease(6), keeper=lease(6))
        swarm.rtt_s = 0.1
        task, _ = leave(swarm, A, text=(BLOB,))
        done, took_s = await timed(task)
        assert not done
        assert took_s < IN_VAIN_S + 2
        assert "nobody else has all of the run's text" in caplog.text
        swarm.gone.clear()
        swarm.holds[KEEPER].add(BLOB)
        task, _ = leave(swarm, A, text=(BLOB,))
        assert await task.run()

    run_virtual(story())


def test_it_renews_its_lease_while_it_waits_for_others_find_its_model_by_it(monkeypatch):
    async def story():
        swarm = Swarm(a=lease(6), keeper=lease(3))
        task, _ = leave(swarm, A)
        renewed = []
        task.renew_lease = lambda: renewed.append(1)
        await task.run()
        assert len(renewed) > STILL_S / module.POLL_S / 2

    run_virtual(story())
