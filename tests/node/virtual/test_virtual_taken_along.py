"""Whole nodes that come to a chain whose last member went on in an epoch of its own, with the chain's model."""

import asyncio

import pytest

from atoll.p2p.transports.memory.virtual_time import run_virtual

LEASE_S, TRAIN_S, CUT_S = 20.0, 3.0, 60.0


@pytest.mark.parametrize("after_s", [1.0, 2.0])
def test_members_go_where_the_model_is_when_all_that_meet_left_their_own(world, after_s):
    """One hears two that hear nobody, so it decides a round that these decide by themselves."""

    async def story() -> None:
        async with world(10_000, 3, lease_s=LEASE_S, quorum_256=192, grace_256=128) as w:
            one, two, three = (w.start(number, TRAIN_S) for number in range(3))
            await w.until(lambda: w.all_final(4))
            await asyncio.sleep(after_s)
            loop = asyncio.get_running_loop()
            for deaf in (one, three):
                for heard in {one, two, three} - {deaf}:
                    way = heard.peer, deaf.peer
                    w.network.direction(*way).is_cut = True
                    loop.call_later(w.network.silence_s, w.network._give_up, *way)
            await asyncio.sleep(CUT_S)
            firsts = [node.driver.finality.chain[-1].first for node in (one, two, three)]
            assert firsts == [5, 6, 5], "it took a round that the others left along"
            newest = two.driver.finality.last_final
            w.network.heal()
            assert await w.until(lambda: w.all_final(newest + 4), 60.0) < 60.0
            w.check_agreement()

    run_virtual(story())
