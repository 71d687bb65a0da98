"""Invites: the link round-trips, and each way of being wrong has its own clear line."""

import base64
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.protocols import codec
from atoll.protocols.errors import ConfigError, DecodeError
from atoll.protocols.identity import Identity
from atoll.protocols.ids import RunId, digest, peer_id_of
from atoll.protocols.run.admission import make_token
from atoll.protocols.run.invite import (
    EMBED_MAX_BYTES,
    Invite,
    Seed,
    decode_invite,
    link_of,
    make_invite,
    read_invite,
    seeds_of,
    sign_invite,
)

OWNER = Identity(bytes(range(32)))
RUN = RunId(digest(b"run"))
PEER = peer_id_of(bytes(32))
SEEDS = seeds_of([f"/ip4/203.0.113.7/tcp/4710/p2p/{PEER}", f"/ip4/203.0.113.7/udp/4710/quic-v1/p2p/{PEER}"])
EXPIRES = 2_000_000_000
TOKEN = make_token(RUN, OWNER, bytes(range(32, 64)), EXPIRES, "friends", 5)
LINK = make_invite(OWNER, RUN, SEEDS, EXPIRES, TOKEN)
GOLDEN = (
    "atoll:aeawissjy32jprbau76o5wrhl4oxjv65axibhgif2kdpp7rxw45q74uv4noihm3nrrbm45zvsqajdeweeaaaaaaaaa"
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaabevzf5uxanbpgiydglrqfyytcmzog4xxiy3qf42domjq3eqs62lqgq"
    "xtembtfyyc4mjrgmxdol3vmryc6nbxgeyc64lvnfrs25rrsgk4iibaeercgjbfeytsqkjkfmwc2lrpgaytemzugu3doobzhi"
    "5typj6h7hhonmuactwm4tjmvxgi4yfyrahemudusdkx7eie2dl3olkus34q42nnnsycroceagakyaisxmt7gcmyg7te3i6mz"
    "lm5xxaozu2g5hixstrflfxylychhk7x2o3w7oxbpcabrbaaoqqpp7tzyil4hlq3umoos6atft6jvrqtosq2xy53sdgiesvgg"
    "4miqc55mbedqfdmainihrafafx6loroupp2evb6qdqq44m4onaixdp4y2ueepv5i5iqtib6742lvwifla2hl6zv4nlrykvsu"
    "ymm6i5c24a6"
)


def wrong(text: str, unix_s: float = 1.9e9) -> str:
    with pytest.raises(DecodeError) as caught:
        decode_invite(text, unix_s)
    line = caught.value.line()
    assert "\n" not in line
    return line


def test_golden_link() -> None:
    assert LINK == GOLDEN
    assert len(make_invite(OWNER, RUN, SEEDS, EXPIRES)) < 420, "fits a QR of 80 columns"


def test_what_a_link_says() -> None:
    invite = decode_invite(LINK, 1.9e9)
    assert (invite.run, invite.signer, invite.expires) == (RUN, OWNER.peer_id, EXPIRES)
    assert invite.token == (TOKEN,)
    assert invite.seed_texts == (
        f"/ip4/203.0.113.7/tcp/4710/p2p/{PEER}",
        f"/ip4/203.0.113.7/udp/4710/quic-v1/p2p/{PEER}",
    )


@pytest.mark.parametrize(
    "text",
    [
        f"  {LINK}\n",
        LINK.upper(),
        LINK.replace("atoll:", "atoll://"),
        LINK.replace("atoll:", "atoll://") + "/",
        "\n".join(LINK[at : at + 40] for at in range(0, len(LINK), 40)),
    ],
)
def test_what_mail_programs_do_to_a_link(text: str) -> None:
    assert read_invite(text) == read_invite(LINK)


def test_cut_off() -> None:
    whole = len(LINK) - len("atoll:")
    for cut in range(len("atoll:"), len(LINK)):
        line = wrong(LINK[:cut])
        assert line.startswith("the invite is cut off: "), line
    assert wrong(LINK[:-1]) == (
        f"the invite is cut off: {whole - 1} of {whole} characters are here; copy the whole link, in quotes"
    )


def test_mistyped() -> None:
    letters = "abcdefghijklmnopqrstuvwxyz234567"
    chance = random.Random(1)
    for place in range(len("atoll:") + 5, len(LINK)):
        other = chance.choice(letters.replace(LINK[place], ""))
        line = wrong(LINK[:place] + other + LINK[place + 1 :])
        assert line.startswith("the invite is mistyped: "), line
    assert wrong(LINK + "a").startswith("the invite is mistyped: ")
    assert "'0' at place 3 is in no invite" in wrong("atoll:ab0" + LINK[9:])


def test_expired() -> None:
    assert read_invite(LINK).expires == EXPIRES
    decode_invite(LINK, EXPIRES - 1)
    assert "the invite expired 0 h 0 min ago; ask " in wrong(LINK, EXPIRES)
    assert "the invite expired 3 d 1 h ago" in wrong(LINK, EXPIRES + 73 * 3600 + 5)


def test_newer_version() -> None:
    body = codec.encode([b"who knows", 1])
    assert "made by a newer atoll (version 3; this one reads 2); upgrade atoll" in wrong(link_of(body, 3))
    assert "which never was" in wrong(link_of(body, 0))


def test_forged() -> None:
    invite = read_invite(LINK)
    swapped = Invite(RUN, EXPIRES + 1, invite.seeds, invite.token, b"", invite.key, invite.signature)
    assert "was changed after " in wrong(link_of(codec.encode(swapped)))


def test_not_an_invite() -> None:
    assert "begins with atoll:" in wrong("https://example.org")
    assert "far too long" in wrong("atoll:" + "a" * 40_000)
    assert "only 0 characters" in wrong("atoll:")


@pytest.mark.parametrize(
    "change",
    [
        {"run": RunId(b"short")},
        {"expires": 0},
        {"expires": 1 << 50},
        {"seeds": (Seed(b"", ("/ip4/1.2.3.4/tcp/1",)),)},
        {"seeds": (Seed(bytes(32), ()),)},
        {"seeds": (Seed(bytes(31), ("/ip4/1.2.3.4/tcp/1",)),)},
        {"seeds": (Seed(bytes(32), ("/ip4/1\x1b[2J",)),)},
        {"seeds": (Seed(bytes(32), ("ip4",)),)},
        {"seeds": (Seed(bytes(32), ("/" + "x" * 256,)),)},
        {"seeds": (Seed(bytes(32), ("/a",)),) * 17},
        {"token": (TOKEN, TOKEN)},
        {"run_file": bytes(EMBED_MAX_BYTES + 1)},
    ],
)
def test_illegal_values_are_neither_made_nor_read(change: dict) -> None:
    fields = {"run": RUN, "expires": EXPIRES, "seeds": SEEDS, "token": (), "run_file": b""} | change
    draft = Invite(**fields, key=OWNER.public_key, signature=b"")
    with pytest.raises(DecodeError):
        sign_invite(OWNER, draft)
    unsigned = codec.encode(tuple(getattr(draft, name) for name in Invite.__struct_fields__[:-1]))
    signed = Invite(**fields, key=OWNER.public_key, signature=OWNER.sign("invite/1", unsigned))
    with pytest.raises(DecodeError):
        read_invite(link_of(codec.encode(signed)))


def test_seeds_of_texts() -> None:
    (node,) = SEEDS
    assert node == Seed(bytes(32), ("/ip4/203.0.113.7/tcp/4710", "/ip4/203.0.113.7/udp/4710/quic-v1"))
    relayed = f"/ip4/1.2.3.4/tcp/1/p2p/{OWNER.peer_id}/p2p-circuit/p2p/{PEER}"
    (seed,) = seeds_of([relayed])
    assert seed.key == bytes(32)
    assert read_invite(make_invite(OWNER, RUN, (seed,), EXPIRES)).seed_texts == (relayed,)
    assert seeds_of(["/dnsaddr/seeds.example.org"]) == (Seed(b"", ("/dnsaddr/seeds.example.org",)),)
    for bad in ("/ip4/1.2.3.4/tcp/1", "/ip4/1.2.3.4/tcp/1/p2p/QmFoo", ""):
        with pytest.raises(ConfigError):
            seeds_of([bad])


maddrs = st.from_regex(r"/dnsaddr/[a-z]{1,20}\.[a-z]{2,9}", fullmatch=True)
seeds = st.builds(
    Seed, st.just(b"") | st.binary(min_size=32, max_size=32), st.lists(maddrs, min_size=1, max_size=8).map(tuple)
)
tokens = st.builds(
    lambda secret, expires, name, members: make_token(RUN, OWNER, secret, expires, name, members),
    st.binary(min_size=32, max_size=32),
    st.integers(1, (1 << 40) - 1),
    st.text("äbc 1", max_size=32),
    st.integers(0, 1000),
)


@settings(max_examples=200, deadline=None)
@given(
    st.binary(min_size=32, max_size=32),
    st.lists(seeds, max_size=4).map(tuple),
    st.integers(1, (1 << 40) - 1),
    st.none() | tokens,
    st.binary(max_size=EMBED_MAX_BYTES),
)
def test_round_trip(run, nodes, expires, token, run_file) -> None:
    invite = read_invite(make_invite(OWNER, RunId(run), nodes, expires, token, run_file))
    assert (invite.run, invite.seeds, invite.expires, invite.run_file) == (run, nodes, expires, run_file)
    assert invite.token == ((token,) if token else ())
    assert invite.signer == OWNER.peer_id


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400), st.integers(0, 255))
def test_any_bytes_are_an_invite_or_a_decode_error(body, version) -> None:
    with pytest.raises(DecodeError):
        read_invite(link_of(body, version))


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=300))
def test_any_text_is_an_invite_or_a_decode_error(text) -> None:
    for candidate in (text, "atoll:" + text):
        with pytest.raises(DecodeError):
            read_invite(candidate)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_changed_body_with_a_right_check_is_refused(data) -> None:
    packed = LINK.removeprefix("atoll:").upper()
    body = bytearray(base64.b32decode(packed + "=" * (-len(packed) % 8))[7:])
    place = data.draw(st.integers(0, len(body) - 1))
    body[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DecodeError):
        read_invite(link_of(bytes(body)))
