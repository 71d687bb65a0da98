"""Seeds, multiaddrs, the address book and its cache."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.host.maddrs import legal_maddrs, parse_maddr
from atoll.p2p.membership.address_book import CACHED_PEERS, AddressBook, parse_seed
from atoll.protocols.errors import ConfigError, DecodeError
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId


def peer(number: int) -> PeerId:
    return Identity(number.to_bytes(32, "big")).peer_id


P, Q = peer(1), peer(2)
TCP = "/ip4/203.0.113.7/tcp/4001"


@pytest.mark.parametrize(
    "maddr",
    [
        TCP,
        "/ip4/10.0.0.1/udp/4001/quic-v1",
        "/ip6/2001:db8::1/tcp/4001",
        "/dns4/node.example.org/tcp/4001",
        "/dns/a-b.example/udp/1/quic-v1",
        f"{TCP}/p2p/{Q}/p2p-circuit",
        f"/p2p/{Q}/p2p-circuit",
        "/memory/3",
        "/ip4/1.2.3.4/tcp/443/wss",
    ],
)
def test_good_seeds(maddr: str) -> None:
    assert parse_seed(f"  {maddr}/p2p/{P}\n") == PeerAddress(P, (maddr,))


@pytest.mark.parametrize(
    "seed",
    [
        "",
        "203.0.113.7:4001",
        TCP,
        f"/p2p/{P}",
        f"{TCP}/p2p/",
        f"{TCP}/p2p/QmYwAPJzv5CZsnA625s3Xf2nemtYgPpHdWEz79ojWnPbdG",
        f"{TCP}/p2p/{P[:-1]}",
        f"/ip4/203.0.113.7/p2p/{P}",
        f"/ip4/203.0.113.700/tcp/4001/p2p/{P}",
        f"/ip4/203.0.113.7/tcp/0/p2p/{P}",
        f"/ip4/203.0.113.7/tcp/65536/p2p/{P}",
        f"/ip4/203.0.113.7/tcp/٣/p2p/{P}",
        f"/ip4/224.0.0.1/tcp/1/p2p/{P}",
        f"/tcp/4001/ip4/1.2.3.4/p2p/{P}",
        f"/ip4/1.2.3.4/udp/4001/p2p/{P}",
        f"/dns4/bad name/tcp/1/p2p/{P}",
        f"/unix/tmp/socket/p2p/{P}",
        f"{TCP}/p2p/{Q}/p2p/{P}",
        f"{TCP}{'/p2p-circuit' * 40}/p2p/{P}",
    ],
)
def test_bad_seeds_say_what_a_seed_looks_like(seed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_seed(seed)
    assert "a seed looks like" in caught.value.hint


@given(
    st.one_of(st.text(max_size=300), st.from_regex(r"(/(ip4|tcp|p2p|udp|quic-v1|1\.2\.3\.4|7))*", fullmatch=True))
)
def test_any_text_is_a_multiaddr_or_a_decode_error(text: str) -> None:
    try:
        assert parse_maddr(text) == text
    except DecodeError:
        assert legal_maddrs([text]) == ()


def test_the_book_learns_and_forgets_the_worst() -> None:
    book = AddressBook(P, max_peers=3)
    book.add(P, [TCP], "exchange")
    assert book.all() == [], "we do not dial ourselves"
    book.add(peer(2), [TCP], "seed")
    book.add(peer(3), [TCP], "exchange")
    book.add(peer(4), [TCP], "exchange")
    book.connected(peer(4), 1.0)
    book.add(peer(5), ["nonsense"], "dht")
    book.add(peer(6), [TCP], "dht")
    assert {known.peer for known in book.all()} == {peer(2), peer(4), peer(6)}


def test_newest_addresses_come_first_and_are_few() -> None:
    book = AddressBook(P)
    for port in range(1, 30):
        book.add(Q, [f"/ip4/1.2.3.4/tcp/{port}"], "exchange")
    book.add(Q, ["/ip4/1.2.3.4/tcp/20"], "dht")
    known = book.get(Q)
    assert known is not None
    assert known.address.maddrs[:2] == ("/ip4/1.2.3.4/tcp/20", "/ip4/1.2.3.4/tcp/29")
    assert len(known.address.maddrs) == 16


def test_the_cache_keeps_the_best_peers(tmp_path: Path) -> None:
    book = AddressBook(P)
    for number in range(2, 100):
        book.add(peer(number), [f"/ip4/1.2.3.4/tcp/{number}"], "exchange")
        if number != 50:
            book.connected(peer(number), float(number))
    book.save(tmp_path / "peers.json")
    again = AddressBook(P)
    assert again.load(tmp_path / "peers.json") == CACHED_PEERS
    assert [known.peer for known in again.all()][:2] == [peer(99), peer(98)]
    assert again.get(peer(50)) is None


def test_a_life_without_a_connection_leaves_the_cache_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    book = AddressBook(P)
    book.add(Q, [TCP, "/ip4/1.2.3.4/tcp/2"], "exchange")
    book.connected(Q, 1.0)
    book.save(path)
    written = path.read_bytes()
    offline = AddressBook(P)
    offline.load(path)
    offline.failed(Q, "refused", 5.0)
    offline.save(path)
    assert path.read_bytes() == written


def test_cached_peers_that_fail_sink_but_stay_and_their_addresses_keep_their_order(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    book = AddressBook(P)
    for number in (2, 3, 4):
        book.add(peer(number), [TCP, f"/ip4/1.2.3.4/tcp/{number}"], "exchange")
        book.connected(peer(number), 1.0)
    book.save(path)
    for life in range(1, 4):
        book = AddressBook(P)
        book.load(path)
        assert [known.peer for known in book.all()] == (
            [peer(4), peer(3), peer(2)] if life == 1 else [peer(2), peer(3), peer(4)]
        )
        book.add(peer(4), ["/ip4/9.9.9.9/tcp/9"], "dht")
        book.failed(peer(4), "refused", 5.0)
        book.connected(peer(3), 1.0)
        book.connected(peer(2), 2.0)
        book.save(path)
    last = AddressBook(P)
    last.load(path)
    dead = last.get(peer(4))
    assert dead is not None
    assert dead.misses == 3
    assert dead.address.maddrs == ("/ip4/9.9.9.9/tcp/9", "/ip4/1.2.3.4/tcp/4", TCP)


def test_hearsay_does_not_push_the_cache_out(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    book = AddressBook(P)
    book.add(Q, [TCP], "exchange")
    book.connected(Q, 1.0)
    book.save(path)
    book = AddressBook(P, max_peers=3)
    book.load(path)
    for number in range(10, 30):
        book.add(peer(number), [TCP], "exchange")
    assert book.get(Q) is not None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"format":2,"peers":[]}', "[" * 100_000, '{"format":1,"peers":[{"peer":"x","maddrs":[]}]}'],
)
def test_a_damaged_cache_is_no_cache(tmp_path: Path, text: str) -> None:
    (tmp_path / "peers.json").write_text(text)
    assert AddressBook(P).load(tmp_path / "peers.json") == 0
    assert AddressBook(P).load(tmp_path / "none.json") == 0


def test_an_excluded_peer_is_forgotten_and_learnt_no_more():
    book = AddressBook(PeerId("own"))
    peer = PeerId("excluded")
    book.add(peer, ["/ip4/192.0.2.1/tcp/1"], "seed")
    book.exclude(peer)
    book.add(peer, ["/ip4/192.0.2.1/tcp/1"], "exchange")
    assert book.get(peer) is None
