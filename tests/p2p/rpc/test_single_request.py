"""Single requests: few of one peer at a time, and what is too large is refused before it is read."""

import asyncio

import pytest

from atoll.p2p.host.framing import write_frame
from atoll.p2p.rpc.single_request import AT_ONCE, SingleRequests
from atoll.protocols.errors import DecodeError

PROTOCOL = "/test/single/1"


def test_few_requests_of_one_peer_are_answered_at_a_time(run_memory):
    async def scenario(lab):
        a, b = await lab.pair()
        running, most = 0, 0

        async def slow(peer, request):
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(1)
            running -= 1
            return request

        SingleRequests(b, PROTOCOL, 100).set_handler(slow)
        asking = SingleRequests(a, PROTOCOL, 100)
        said = [b"%d" % number for number in range(5 * AT_ONCE)]
        assert await asyncio.gather(*(asking.ask(b.peer_id, one, 100) for one in said)) == said
        assert most == AT_ONCE

    run_memory(scenario)


def test_an_answer_above_its_cap_is_a_decode_error(run_memory):
    async def scenario(lab):
        a, b = await lab.pair()

        async def large(peer, request):
            return bytes(101)

        SingleRequests(b, PROTOCOL, 100).set_handler(large)
        with pytest.raises(DecodeError, match="at most 100"):
            await SingleRequests(a, PROTOCOL, 100).ask(b.peer_id, b"?", 100)

    run_memory(scenario)


def test_an_answer_that_nobody_reads_is_given_up(run_memory):
    """Else each request of a peer that reads nothing would keep an answer in memory for ever."""

    async def scenario(lab):
        a, b = await lab.pair()

        async def large(peer, request):
            return bytes(8 << 20)

        SingleRequests(b, PROTOCOL, 100, answer_s=5.0).set_handler(large)
        stream = await a.open_stream(b.peer_id, PROTOCOL)
        await write_frame(stream, b"?")
        await asyncio.sleep(4.0)
        assert b.statistics().streams_open == 1
        await asyncio.sleep(2.0)
        assert b.statistics().streams_open == 0
        stream.reset()

    run_memory(scenario)
