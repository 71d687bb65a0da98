"""Length frames: sizes are checked before anything is read."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.p2p.host.framing import framed, read_frame, write_frame
from atoll.protocols.errors import DecodeError, Unreachable


class Tape:
    """A stream that reads back what was written; it remembers the largest read."""

    def __init__(self, data=b""):
        self.data = data
        self.largest = 0

    async def read_exactly(self, size):
        self.largest = max(self.largest, size)
        if size > len(self.data):
            raise Unreachable("ended")
        head, self.data = self.data[:size], self.data[size:]
        return head

    async def write(self, data):
        self.data += bytes(data)


@given(st.lists(st.binary(max_size=300), max_size=8))
def test_frames_come_back_in_order(bodies):
    async def check():
        tape = Tape()
        for body in bodies:
            await write_frame(tape, memoryview(body))
        assert [await read_frame(tape, 300) for _ in bodies] == bodies
        assert tape.data == b""

    asyncio.run(check())


def test_golden_bytes():
    assert framed(b"abc") == bytes.fromhex("03000000616263")
    assert framed(b"") == bytes(4)


async def test_a_large_size_is_refused_before_it_is_read():
    tape = Tape((0xFFFFFFFF).to_bytes(4, "little") + b"x" * 100)
    with pytest.raises(DecodeError, match="4294967295"):
        await read_frame(tape, 100)
    assert tape.largest == 4


async def test_the_cap_itself_is_legal():
    assert await read_frame(Tape(framed(b"x" * 100)), 100) == b"x" * 100
    with pytest.raises(DecodeError):
        await read_frame(Tape(framed(b"x" * 101)), 100)


async def test_a_cut_frame_is_unreachable():
    for size in range(7):
        with pytest.raises(Unreachable):
            await read_frame(Tape(framed(b"abc")[:size]), 100)
