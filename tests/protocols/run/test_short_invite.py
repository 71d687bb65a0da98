"""Short links: 106 characters with an IPv4 address; they bind the invite that they stand for, and nothing else."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.protocols.errors import DecodeError
from atoll.protocols.identity import Identity
from atoll.protocols.ids import RunId
from atoll.protocols.run.invite import (
    SHORT_VERSION,
    Seed,
    invite_id,
    link_again,
    link_of,
    make_invite,
    read_invite,
    read_short,
    shorten,
)

ME, OTHER = Identity(bytes([5]) * 32), Identity(bytes([6]) * 32)
RUN = RunId(bytes([7]) * 32)
EXPIRES = 2_000_000_000
TCP, QUIC = "/ip4/203.0.113.7/tcp/4710", "/ip4/203.0.113.7/udp/4710/quic-v1"


def link_with(*maddrs: str, key: bytes = ME.public_key, expires: int = EXPIRES) -> str:
    return make_invite(ME, RUN, (Seed(OTHER.public_key, ("/ip4/8.8.8.8/tcp/1",)), Seed(key, maddrs)), expires)


@pytest.mark.parametrize(
    ("maddrs", "kept", "characters"),
    [
        ((TCP,), (TCP,), 106),
        ((QUIC,), (QUIC,), 106),
        ((TCP, QUIC), (TCP, QUIC), 106),
        ((QUIC, TCP), (TCP, QUIC), 106),
        (("/ip6/2001:db8::7/tcp/4710", QUIC), (QUIC,), 106),
        ((TCP, "/ip4/203.0.113.7/udp/4711/quic-v1"), (TCP,), 106),
        (("/ip6/2001:db8::7/tcp/4710", "/ip6/2001:db8::7/udp/4710/quic-v1"),) * 2 + (125,),
        (("/dns4/a.example/tcp/4710",), ("/dns4/a.example/tcp/4710",), 134),
        (("/ip4/203.0.113.7/tcp/4710/ws",), ("/ip4/203.0.113.7/tcp/4710/ws",), 141),
    ],
)
def test_what_a_short_link_holds(maddrs, kept, characters) -> None:
    link = link_with(*maddrs)
    text = shorten(link)
    assert len(text) == characters
    seen = read_short(text.upper())
    assert seen is not None
    assert (seen.id, seen.key, seen.peer, seen.maddrs) == (
        invite_id(read_invite(link)), ME.public_key, ME.peer_id, kept,
    )  # fmt: skip


def test_a_node_behind_a_relay_has_no_short_link() -> None:
    relayed = f"/ip4/203.0.113.7/tcp/4710/p2p/{OTHER.peer_id}/p2p-circuit"
    assert shorten(link_with(relayed)) == ""
    seen = read_short(shorten(link_with(relayed, TCP)))
    assert seen is not None
    assert seen.maddrs == (TCP,)


def test_a_link_that_does_not_name_its_signer_has_no_short_form() -> None:
    assert shorten(link_with(TCP, key=Identity(bytes([9]) * 32).public_key)) == ""


def test_a_long_link_is_read_as_ever() -> None:
    link = link_with(TCP)
    assert read_short(link) is None
    assert link_again(read_invite(link)) == link
    with pytest.raises(DecodeError, match="short invite"):
        read_invite(shorten(link))


def test_another_invite_has_another_id() -> None:
    assert invite_id(read_invite(link_with(TCP))) != invite_id(read_invite(link_with(TCP, expires=EXPIRES + 1)))


HEAD = bytes(16) + ME.public_key


@pytest.mark.parametrize(
    "place",
    [b"", b"\x14", b"\x14" + bytes(5), b"\x14" + bytes(7), b"\x04" + bytes(6), b"\x54" + bytes(6),
     b"\x16" + bytes(6), b"\x15" + bytes(6), b"\0", b"\0/", b"\0ip4", b"\0/a b", b"\0/a\n",
     b"\0/" + b"a" * 256, b"\0/\xff"],
)  # fmt: skip
def test_illegal_addresses(place) -> None:
    with pytest.raises(DecodeError):
        read_short(link_of(HEAD + place, SHORT_VERSION))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes_are_a_short_link_or_a_decode_error(body) -> None:
    try:
        seen = read_short(link_of(body, SHORT_VERSION))
    except DecodeError:
        return
    assert seen is not None
    assert seen.maddrs
    assert all(maddr.startswith("/") for maddr in seen.maddrs)
