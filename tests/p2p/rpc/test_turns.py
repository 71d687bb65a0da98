"""Turns of large calls: one at a time, the peer first that took least, and half of the time for all else."""

import asyncio
from itertools import pairwise

import pytest

from atoll.p2p.host.framing import write_frame
from atoll.p2p.rpc import frames
from atoll.p2p.rpc.turns import BURST_S, MOST_TURN_S, CallTurns, Share
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols import codec
from tests.p2p.rpc.test_calls import Member, Number, members, raw_stream

COST_S = 0.05


class Order:
    """Who had turns, and when each began."""

    def __init__(self):
        self.turns, self.began = CallTurns(), []
        self.running = self.most = 0

    async def take(self, name, share, cost_s=COST_S):
        """One turn; names of strangers are capitals."""
        async with self.turns.turn(share, is_stranger=name.isupper()):
            self.running += 1
            self.most = max(self.most, self.running)
            self.began.append((name, round(asyncio.get_running_loop().time(), 3)))
            await asyncio.sleep(cost_s)
            self.running -= 1

    @property
    def names(self):
        return "".join(name for name, _ in self.began)


def test_turns_take_at_most_half_of_the_time():
    async def scenario():
        order = Order()
        await asyncio.gather(*(order.take("a", Share()) for _ in range(10)))
        assert order.most == 1
        assert [at for _, at in order.began] == [pytest.approx(2 * COST_S * turn) for turn in range(10)]

    run_virtual(scenario())


def test_a_machine_that_stood_still_in_a_turn_costs_nobody_as_much_again():
    async def scenario():
        order, share = Order(), Share()
        await asyncio.gather(order.take("a", share, 30.0), order.take("b", Share()))
        assert order.began == [("a", 0.0), ("b", pytest.approx(30.0 + MOST_TURN_S))]
        assert share.used_s == MOST_TURN_S

    run_virtual(scenario())


def test_a_peer_that_asks_for_little_waits_for_few():
    """Four strangers ask without end. A peer that costs a tenth has ten turns to each one of theirs."""

    async def scenario():
        order = Order()

        async def ask(name, cost_s, count):
            share = Share()
            for _ in range(count):
                await order.take(name, share, cost_s)

        async with asyncio.TaskGroup() as group:
            for name in "abcd":
                group.create_task(ask(name, COST_S, 20))
            await asyncio.sleep(2)
            group.create_task(ask("h", COST_S / 10, 10))
        late = order.names[order.names.index("h") :]
        assert late.rindex("h") <= 10 + 2 * 4, late

    run_virtual(scenario())


async def ask_without_end(order, name):
    share = Share()
    while True:
        await order.take(name, share)


@pytest.mark.parametrize("strangers", [1, 32])
def test_strangers_keep_no_member_waiting_for_more_than_one_turn(strangers):
    async def scenario():
        order, share, loop = Order(), Share(), asyncio.get_running_loop()
        asking = [loop.create_task(ask_without_end(order, "S")) for _ in range(strangers)]
        await asyncio.sleep(2)
        for _ in range(20):
            began = loop.time()
            await order.take("m", share, COST_S / 4)
            assert loop.time() - began < 2 * COST_S + COST_S / 2
            await asyncio.sleep(COST_S / 3)
        for task in asking:
            task.cancel()

    run_virtual(scenario())


def test_strangers_have_a_quarter_of_the_time():
    async def scenario():
        order = Order()
        await asyncio.gather(*(order.take("S", Share()) for _ in range(60)))
        gaps = [after - before for before, after in pairwise(at for _, at in order.began)]
        assert gaps[:10] == pytest.approx([2 * COST_S] * 10), "a newcomer that catches up has half of it at first"
        assert gaps[-30:] == pytest.approx([4 * COST_S] * 30)

    run_virtual(scenario())


@pytest.mark.parametrize("pause_s", [0.0, 0.7, 5.0])
def test_a_flood_of_new_names_has_no_more_than_its_quarter_and_one_burst(pause_s):
    """Whatever strangers wait for, in any time they had a quarter of it, the burst and a turn."""

    async def scenario():
        order, loop = Order(), asyncio.get_running_loop()
        for _ in range(12):
            async with asyncio.TaskGroup() as group:
                for _ in range(20):
                    group.create_task(order.take("S", Share()))
            await asyncio.sleep(pause_s)
        at = [began for _, began in order.began]
        for first, one in enumerate(at):
            for many, end in enumerate(at[first + 1 :], 1):
                assert many * COST_S <= (end - one) / 4 + BURST_S + COST_S + 1e-6
        assert loop.time() >= 12 * 20 * COST_S * 2

    run_virtual(scenario())


def test_a_stranger_that_rested_has_its_burst_again():
    async def scenario():
        order, now = Order(), asyncio.get_running_loop().time
        for _ in range(3):
            began = now()
            for _ in range(round(BURST_S / COST_S)):
                await order.take("S", Share())
            assert now() - began < 2 * BURST_S
            await asyncio.sleep(4 * BURST_S)

    run_virtual(scenario())


def test_members_that_ask_without_end_leave_strangers_a_quarter_of_the_turns():
    async def scenario():
        order, loop = Order(), asyncio.get_running_loop()
        asking = [loop.create_task(ask_without_end(order, name)) for name in "SSabcd"]
        await asyncio.sleep(200 * COST_S)
        for task in asking:
            task.cancel()
        assert order.most == 1
        assert order.names.count("S") == pytest.approx(len(order.names) / 4, abs=2)

    run_virtual(scenario())


def test_who_becomes_a_member_begins_anew():
    async def scenario():
        order, share = Order(), Share()
        for _ in range(20):
            await order.take("S", share)
        async with asyncio.TaskGroup() as group:
            for name, its in (("a", Share()), ("m", share), ("b", Share())):
                group.create_task(order.take(name, its))
        assert order.names[-3:] == "amb"

    run_virtual(scenario())


def test_peers_that_cost_the_same_go_round():
    async def scenario():
        order = Order()

        async def ask(name):
            share = Share()
            for _ in range(5):
                await order.take(name, share)

        await asyncio.gather(*map(ask, "abc"))
        assert order.names == 5 * "abc"

    run_virtual(scenario())


@pytest.mark.parametrize("when", ["waits", "has its turn", "would be next"])
def test_a_request_that_is_cancelled_passes_its_turn_on(when):
    async def scenario():
        order = Order()
        async with asyncio.TaskGroup() as group:
            group.create_task(order.take("a", Share()))
            await asyncio.sleep(0)
            second, _ = (group.create_task(order.take(name, Share())) for name in "bc")
            if when == "has its turn":  # in the same turn of the loop, before its task runs
                give = order.turns._next
                order.turns._next = lambda: (give(), second.cancel(), setattr(order.turns, "_next", give))
            elif when == "waits":
                await asyncio.sleep(COST_S / 2)
                second.cancel()
            else:
                give = order.turns._next
                order.turns._next = lambda: (second.cancel(), give())
        assert second.cancelled()
        assert order.names == "ac"
        await order.take("d", Share())

    run_virtual(scenario())


def test_large_calls_have_turns_and_others_do_not_wait(run_memory):
    """A stranger keeps 64 large calls in flight; pings of its victim's neighbours are answered meanwhile."""

    async def scenario(lab):
        a, b = await members(lab)
        loop = asyncio.get_running_loop()
        running = most = 0

        async def large(peer, request):
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(COST_S)
            running -= 1
            return request

        async def small(peer, request):
            return request

        b.calls.register("large", Number, Number, large, max_bytes=1 << 18)
        b.calls.register("small", Number, Number, small)
        async with asyncio.TaskGroup() as group:
            for number in range(64):
                group.create_task(a.calls.call(b.peer_id, "large", Number(number), Number, max_bytes=1 << 18))
            await asyncio.sleep(0.1)
            for _ in range(5):
                began = loop.time()
                await a.calls.call(b.peer_id, "small", Number(1), Number)
                assert loop.time() - began < 0.1
        assert most == 1

    run_memory(scenario)


def test_one_peer_of_many_requests_has_one_place(run_memory, dial):
    """A stranger with 64 requests in flight is one of two peers, not 64 of 65."""

    async def scenario(lab):
        a, b = await lab.pair()
        member, c = await Member.join(lab, b), await lab.host()
        order = []

        async def large(peer, request):
            order.append(peer)
            await asyncio.sleep(COST_S)
            return request

        member.calls.register("large", Number, Number, large, max_bytes=1 << 18)
        await c.connect(await dial(b))
        honest = await Member.join(lab, c)
        stream = await raw_stream(a, b)
        for number in range(64):
            await write_frame(stream, frames.request(number, "large", codec.encode(Number(number))))
        await asyncio.sleep(1)
        before = len(order)
        for number in range(3):
            await honest.calls.call(b.peer_id, "large", Number(number), Number, max_bytes=1 << 18)
        assert order[before:].count(a.peer_id) <= 4
        stream.reset()

    run_memory(scenario)
