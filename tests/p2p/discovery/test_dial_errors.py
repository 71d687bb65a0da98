"""The texts are go-libp2p's own, as hivemind's p2pd sent them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.p2p.discovery.dial_errors import DialFault, explain

P = "12D3KooWRrBPpiKJ3KbMdAqqNzoJGTaJua11eCxVDr9GT6qdr8hh"
Q = "12D3KooWCugzopk9fYBy1pvYVi94Qr2y9PL4CjSpYZUaXir3YWb7"
HEAD = f"failed to dial: failed to dial {P}: all dials failed"
MISMATCH = f"peer id mismatch: expected {P}, but remote key matches {Q}"


@pytest.mark.parametrize(
    ("why", "trouble", "reason"),
    [
        ("dial tcp4 127.0.0.1:1: connect: connection refused", DialFault.REFUSED, "connection refused"),
        (
            "dial tcp4 10.9.0.9:4001: connect: network is unreachable",
            DialFault.NO_ROUTE,
            "network is unreachable",
        ),
        ("dial tcp6 [2001:db8::1]:4001: connect: no route to host", DialFault.NO_ROUTE, "no route to host"),
        ("dial tcp4 10.97.0.9:1: connect: permission denied", DialFault.NO_ROUTE, "this machine may not"),
        ("dial tcp4 10.96.0.9:1: connect: invalid argument", DialFault.NO_ROUTE, "this machine may not"),
        (
            "INTERNAL_ERROR (local): write udp4 0.0.0.0:41135->10.98.0.9:4001: sendmsg: no route to host",
            *(DialFault.NO_ROUTE, "no route to host"),
        ),
        ("dial tcp4 0.0.0.0:35015->127.0.0.1:4001: i/o timeout", DialFault.SILENT, "no answer"),
        ("timeout: no recent network activity", DialFault.SILENT, "no answer"),
        ("context deadline exceeded", DialFault.SILENT, "no answer"),
        (f"failed to negotiate security protocol: {MISMATCH}", DialFault.WRONG_PEER, Q),
        (f"CRYPTO_ERROR 0x12a (local): {MISMATCH}", DialFault.WRONG_PEER, Q),
        (
            "failed to negotiate security protocol: context deadline exceeded",
            *(DialFault.HANDSHAKE, "connected, but no libp2p answer"),
        ),
        (
            "failed to negotiate security protocol: read tcp4 127.0.0.1:4->127.0.0.1:5: connection reset by peer",
            *(DialFault.HANDSHAKE, "connected, but it does not speak libp2p"),
        ),
        (
            "failed to negotiate security protocol: unexpected EOF",
            DialFault.HANDSHAKE,
            "does not speak libp2p",
        ),
        (
            "error opening relay circuit: NO_RESERVATION (204)",
            DialFault.NO_RELAY,
            "its relay does not know it",
        ),
        (
            "error opening relay circuit: RESOURCE_LIMIT_EXCEEDED (201)",
            DialFault.NO_RELAY,
            "RESOURCE_LIMIT_EXCEEDED",
        ),
        (
            "error opening hop stream to relay: failed to dial: context deadline exceeded",
            *(DialFault.NO_RELAY, "its relay does not answer"),
        ),
        ("undialable IP: 255.255.255.255", DialFault.NO_ADDRESS, "no address that this node can dial"),
        ("dial to self attempted", DialFault.SELF, "this node"),
        ("dial backoff", DialFault.BACKOFF, "failed a moment ago"),
        ("something new in go-libp2p", DialFault.UNKNOWN, "something new in go-libp2p"),
    ],
)
def test_one_address(why: str, trouble: DialFault, reason: str) -> None:
    found = explain(f"{HEAD} * [/ip4/127.0.0.1/tcp/1] {why}", "/ip4/127.0.0.1/tcp/1")
    assert found.kind is trouble
    assert reason in found.reason
    assert found.remedy == trouble.value
    assert explain(f"{HEAD} * [/ip4/127.0.0.1/tcp/1] {why}") == found, "also where the address is not known"


@pytest.mark.parametrize(
    ("text", "maddr", "trouble", "reason"),
    [
        (
            f"failed to dial: failed to dial {P}: no good addresses",
            "/dns4/no.example/tcp/1",
            DialFault.NO_NAME,
            "no.example",
        ),
        (
            f"failed to dial: failed to dial {P}: no good addresses",
            "/ip4/1.2.3.4/tcp/1/ws",
            DialFault.NO_ADDRESS,
            "can dial",
        ),
        ("no answer in 15 s", "", DialFault.SILENT, "no answer in 15 s"),
        ("peer a trains run b, we train run c; check the invite", "", DialFault.OTHER_RUN, "peer a trains run b"),
        (
            "wire calls: we speak 2 to 3, the peer 1 to 1; upgrade the older node",
            "",
            DialFault.OLD_VERSION,
            "another version of atoll: wire calls: we speak 2 to 3, the peer 1 to 1",
        ),
        ("p2pd is not running", "", DialFault.LOCAL, "p2pd is not running"),
        ("hung up soon", "", DialFault.HUNG_UP, "it hangs up"),
        ("nobody answers for 12345678", "", DialFault.UNKNOWN, "nobody answers for 12345678"),
        ("the DNS name _dnsaddr.x.example does not exist", "", DialFault.NO_NAME, "_dnsaddr.x.example"),
        ("no DNS server answers for _dnsaddr.x.example in 4 s", "", DialFault.NO_DNS, "no DNS server answers"),
        ("no dnsaddr record at _dnsaddr.x.example", "", DialFault.NO_RECORD, "_dnsaddr.x.example"),
        ("", "", DialFault.UNKNOWN, "failed"),
    ],
)
def test_texts_without_a_list_of_addresses(text: str, maddr: str, trouble: DialFault, reason: str) -> None:
    found = explain(text, maddr)
    assert found.kind is trouble
    assert reason in found.reason


def test_old_addresses_that_p2pd_remembers_do_not_hide_the_reason() -> None:
    text = (
        f"{HEAD} * [/ip4/127.0.0.1/udp/1/quic-v1] dial backoff"
        " * [/ip4/127.0.0.1/tcp/1] dial tcp4 127.0.0.1:1: connect: connection refused"
        " * [/ip6/2001:db8::1/tcp/4001] dial tcp6 [2001:db8::1]:4001: connect: no route to host"
        f" * [/ip4/127.0.0.1/tcp/35003] failed to negotiate security protocol: {MISMATCH}"
    )
    assert explain(text, "/ip4/127.0.0.1/tcp/1").kind is DialFault.REFUSED
    assert explain(text, "/ip6/2001:db8::1/tcp/4001").kind is DialFault.NO_ROUTE
    assert explain(text, "/ip4/127.0.0.1/udp/1/quic-v1").kind is DialFault.WRONG_PEER, "the most telling of all"
    assert explain(f"{HEAD} * [/a] dial backoff * [/b] dial backoff").kind is DialFault.BACKOFF


def test_a_key_that_was_cut_off_is_not_shown() -> None:
    text = f"{HEAD} * [/a] failed to negotiate security protocol: {MISMATCH}"
    assert explain(text).reason == f"another key answers there: {Q}"
    assert explain(text[:-3]).reason == "another key answers there"


@given(st.text(max_size=400), st.text(max_size=40), st.integers(0, 400))
def test_any_text_cut_anywhere_gives_a_short_reason(text: str, maddr: str, cut: int) -> None:
    for message in (text, f"{HEAD} * [{maddr}] {text}"[:cut]):
        found = explain(message, maddr)
        assert 0 < len(found.reason) <= 200
        assert "\n" not in found.reason


def test_every_trouble_of_others_has_a_remedy() -> None:
    assert [fault for fault in DialFault if not fault.value] == [DialFault.BACKOFF]
