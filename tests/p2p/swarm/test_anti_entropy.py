"""Who is abreast of its neighbours: after an exchange with each, but one that never answers is given up."""

import asyncio
import random
from types import MappingProxyType

from atoll.p2p.swarm.anti_entropy import AntiEntropy
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.errors import DecodeError, PeerFault, Unreachable
from atoll.protocols.ids import PeerId

QUICK, SLOW, DUMB, CROSS, BABBLING = map(PeerId, ("quick", "slow", "dumb", "cross", "babbling"))
FAULTS = {DUMB: Unreachable("nothing comes"), CROSS: PeerFault("it complains"), BABBLING: DecodeError("junk")}


class Exchanges:
    wanted = covered = MappingProxyType({})

    async def exchange(self, peer):
        if peer in FAULTS:
            raise FAULTS[peer]
        await asyncio.sleep(20.0 if peer == SLOW else 0.1)

    async def pull(self, peer):
        pass

    async def fetch(self, peer):
        return 0


def make(exchanges, neighbours):
    return AntiEntropy(
        ledger=exchanges,
        orphans=exchanges,
        registers=exchanges,
        neighbours=neighbours,
        rng=random.Random(1),
        on_fault=lambda *_: None,
        on_local_fault=lambda _: None,
    )


async def abreast_after_s(neighbours):
    now = asyncio.get_running_loop().time
    exchanges = Exchanges()
    repair = make(exchanges, lambda: neighbours)
    began = now()
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(repair.serve())
        for peer in neighbours:
            repair.ask(peer)
        for _ in range(2000):
            if repair.is_caught_up():
                break
            await asyncio.sleep(0.05)
        serving.cancel()
    return now() - began


def test_every_neighbour_that_answers_is_waited_for():
    assert run_virtual(abreast_after_s([QUICK])) < 1
    assert 20 <= run_virtual(abreast_after_s([QUICK, SLOW])) < 21


def test_one_that_breaks_the_protocol_is_not_waited_for_and_is_not_enough():
    for peer in (CROSS, BABBLING):
        assert run_virtual(abreast_after_s([QUICK, peer])) < 1
        assert run_virtual(abreast_after_s([peer])) > 99


def test_who_left_and_came_back_is_asked_again():
    async def story():
        here, exchanges = [QUICK], Exchanges()
        repair = make(exchanges, lambda: here)
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(repair.serve())
            repair.ask(QUICK)
            await asyncio.sleep(1)
            assert repair.is_caught_up()
            here.clear()
            await asyncio.sleep(2)
            here.append(QUICK)
            assert not repair.is_caught_up()
            repair.ask(QUICK)
            await asyncio.sleep(1)
            assert repair.is_caught_up()
            serving.cancel()

    run_virtual(story())


def test_one_that_never_answers_is_given_up_and_is_not_enough():
    assert 1 < run_virtual(abreast_after_s([QUICK, DUMB])) < 15
    assert run_virtual(abreast_after_s([DUMB])) > 99
    assert run_virtual(abreast_after_s([])) > 99
