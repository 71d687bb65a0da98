"""The calls wire: golden bytes, and nothing but DecodeError for anything else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.p2p.host.framing import framed
from atoll.p2p.rpc import frames
from atoll.protocols import codec
from atoll.protocols.errors import DecodeError
from atoll.protocols.identity import Identity
from atoll.protocols.ids import RunId

PEER = Identity(bytes(range(32))).peer_id
RUN = RunId(bytes(range(32)))
METHODS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=64)
NUMBERS = st.integers(0, 2**32 - 1)

GOLDEN = {
    "hello": (
        framed(codec.encode(frames.hello(RUN, PEER, "atoll/1.2"))),
        "8d000000"
        "86a56167656e74a961746f6c6c2f312e32a66e657765737402a66f6c6465737402a470656572d934"
        + PEER.encode().hex()
        + "a372756ec420"
        + RUN.hex()
        + "a477697265a563616c6c73",
    ),
    "request": (framed(frames.request(7, "echo", b"\x01\x02")), "0c00000001070000000465" + "63686f0102"),
    "reply": (framed(frames.reply(7, b"\x01\x02")), "0700000002070000000102"),
    "failure": (
        framed(frames.failure(7, "PeerFault", "too  large\n")),
        "2800000003" + "07000000" + "82a56572726f72a9506565724661756c74a76d657373616765a9746f6f206c61726765",
    ),
    "notice": (framed(frames.notice("lease", b"\x03")), "08000000" + "04056c65617365" + "03"),
    "cancel": (framed(frames.cancel(0xFFFFFFFF)), "05000000" + "05ffffffff"),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bytes(name):
    made, golden = GOLDEN[name]
    assert made.hex() == golden


def test_the_protocol_id():
    assert frames.PROTOCOL == "/atoll/calls/1"


@given(NUMBERS, METHODS, st.binary(max_size=100))
def test_frames_come_back(number, method, body):
    request = frames.parse(frames.request(number, method, body))
    assert request == frames.Frame(frames.Kind.REQUEST, number, method, memoryview(body))
    reply = frames.parse(frames.reply(number, body))
    assert (reply.kind, reply.id, bytes(reply.body)) == (frames.Kind.REPLY, number, body)
    notice = frames.parse(frames.notice(method, body))
    assert (notice.kind, notice.method, bytes(notice.body)) == (frames.Kind.NOTICE, method, body)
    assert frames.parse(frames.cancel(number)).id == number


@given(st.binary(max_size=80))
def test_any_bytes_are_a_frame_or_a_decode_error(data):
    try:
        frame = frames.parse(data)
    except DecodeError:
        return
    again = {
        frames.Kind.REQUEST: lambda: frames.request(frame.id, frame.method, bytes(frame.body)),
        frames.Kind.REPLY: lambda: frames.reply(frame.id, bytes(frame.body)),
        frames.Kind.FAILURE: lambda: data,
        frames.Kind.NOTICE: lambda: frames.notice(frame.method, bytes(frame.body)),
        frames.Kind.CANCEL: lambda: frames.cancel(frame.id),
    }
    assert again[frame.kind]() == data  # one encoding per frame


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00",
        b"\x06\0\0\0\0",
        b"\x01\0\0\0",
        b"\x01\0\0\0\0",
        b"\x01\0\0\0\0\x00",
        b"\x01\0\0\0\0\x41" + b"m" * 65,
        b"\x01\0\0\0\0\x02m",
        b"\x01\0\0\0\0\x01\xff",
        b"\x05\0\0\0\0x",
        b"\x04",
    ],
)
def test_broken_frames(data):
    with pytest.raises(DecodeError):
        frames.parse(data)


@pytest.mark.parametrize(
    "change",
    [{"run": b"short"}, {"agent": "a" * 65}, {"peer": "p" * 65}, {"wire": "w" * 33}, {"newest": "1"}],
)
def test_a_hello_that_breaks_its_limits(change):
    fields = {"agent": "a", "newest": 1, "oldest": 1, "peer": PEER, "run": RUN, "wire": "calls"} | change
    with pytest.raises(DecodeError):
        codec.decode(codec.encode(fields), frames.Hello)


def test_agents_are_cut_to_printable_letters():
    assert frames.hello(RUN, PEER, "a\x1b[31mb\n" + "c" * 100).agent == "a[31mb" + "c" * 58


def test_the_largest_hello_fits_its_frame():
    hello = frames.hello(RUN, PEER, "\U0001f3dd" * 100)
    assert len(codec.encode(hello)) <= frames.HELLO_MAX_BYTES


def test_long_failure_messages_are_cut():
    frame = frames.parse(frames.failure(1, "E" * 100, "m" * 10_000))
    body = codec.decode(frame.body, frames.Failure)
    assert (len(body.error), len(body.message)) == (32, 300)


def test_method_names_are_checked_where_they_are_written():
    for name in ("", "m" * 65):
        with pytest.raises(ValueError, match="method name"):
            frames.request(1, name, b"")
