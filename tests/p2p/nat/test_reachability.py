"""The judgement: which evidence means what."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.p2p.host.maddrs import Endpoint, endpoint_of, is_global
from atoll.p2p.nat.candidates import publishable, split
from atoll.p2p.nat.reachability import Evidence, candidates, judge, without_dial_ports
from atoll.p2p.nat.reachability_survey import usual_ahead_s
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId

A, B = PeerId("a"), PeerId("b")
LISTEN = ("/ip4/192.168.1.2/tcp/4001", "/ip4/192.168.1.2/udp/4001/quic-v1")
KEPT = ("/ip4/11.1.1.1/udp/4001/quic-v1",)
MOVED = ("/ip4/11.1.1.1/udp/5999/quic-v1",)


@pytest.mark.parametrize(
    ("evidence", "reach", "why"),
    [
        (Evidence(), "unknown", "no directly connected peer has said"),  # as well when all that were met are gone
        (Evidence(LISTEN, {A: ("/ip4/192.168.1.9/tcp/1",)}), "unknown", "same network"),
        (Evidence(LISTEN, {A: KEPT}), "punchable", "keeps ports; seen as 11.1.1.1:4001"),
        (Evidence(LISTEN, {A: KEPT}, reached=("/ip4/11.1.1.1/tcp/4001",)), "public", "dialled back at"),
        (Evidence(LISTEN, {A: MOVED}), "relay-only", "changes ports (11.1.1.1:5999)"),
        (Evidence(LISTEN, {A: MOVED, B: MOVED}), "punchable", "5999"),
        (Evidence(LISTEN, {A: KEPT, B: MOVED}), "relay-only", "symmetric NAT"),
        (Evidence(LISTEN, {A: MOVED}, punched=1), "punchable", "a hole was punched"),
        (Evidence(LISTEN, {A: KEPT}, failed=3), "relay-only", "3 punches failed"),
        (Evidence(LISTEN, {A: ("/ip4/11.1.1.1/tcp/4001",)}), "relay-only", "UDP does not get out"),
        (Evidence(LISTEN, {A: KEPT}, reached=KEPT, relay_only=True), "relay-only", "as configured"),
    ],
)
def test_verdicts(evidence, reach, why):
    verdict = judge(evidence)
    assert verdict.reach == reach
    assert why in verdict.why


def test_of_a_host_that_is_seen_by_tcp_alone_one_address_is_shown():
    """Each dial by TCP has a port of its own, so sixteen observers saw sixteen addresses of one host."""
    by_tcp = tuple(f"/ip4/11.1.1.1/tcp/{port}" for port in range(50_000, 50_016))
    assert without_dial_ports(by_tcp) == by_tcp[:1]
    assert without_dial_ports((*by_tcp, *KEPT, *MOVED, *KEPT)) == (*KEPT, *MOVED), "two ports show a symmetric NAT"
    assert without_dial_ports(("/ip4/12.1.1.1/tcp/7", *KEPT, "/ip6/2a00::1/tcp/7", "/memory/3")) == (
        "/ip4/12.1.1.1/tcp/7", *KEPT, "/ip6/2a00::1/tcp/7", "/memory/3",
    )  # fmt: skip


def test_candidates_are_what_a_stranger_could_dial():
    seen = {A: ("/ip4/11.1.1.1/udp/5999/quic-v1", "/ip4/192.168.1.1/tcp/9")}
    listen = (*LISTEN, "/ip4/5.5.5.5/tcp/4001", "/ip6/fd00::2/tcp/4001")
    assert candidates(Evidence(listen, seen)) == (
        "/ip4/5.5.5.5/tcp/4001",
        "/ip4/11.1.1.1/tcp/4001",
        "/ip4/11.1.1.1/udp/4001/quic-v1",
    )


def test_endpoints():
    assert endpoint_of("/ip4/1.2.3.4/udp/5/quic-v1") == Endpoint("1.2.3.4", "udp", 5)
    assert endpoint_of("/ip4/1.2.3.4/tcp/5/p2p/12D/p2p-circuit") is None
    assert endpoint_of("/dns4/example.org/tcp/5") is None
    assert is_global("/ip4/5.10.1.1/tcp/1")
    assert not is_global("/ip4/10.0.0.1/tcp/1")
    assert not is_global("/memory/1")
    assert not is_global("/ip4/100.64.0.1/tcp/1"), "shared address space of carriers"
    assert not is_global("/ip6/fd00::1/udp/1/quic-v1")
    assert not is_global("/ip4/999.1.1.1/tcp/1"), "a peer may say anything"


@given(st.text(alphabet="/ip46.tcpud0123456789:abcdef-quicv", max_size=60))
def test_no_text_crashes_the_parser(text):
    endpoint_of(text)
    is_global(text)


def test_circuits_are_told_from_direct_addresses():
    r, s = Identity(b"r" * 32).peer_id, Identity(b"s" * 32).peer_id
    rsa = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
    through = (f"/p2p/{r}", f"/ip4/6.6.6.6/tcp/2/p2p/{r}", f"/ip4/7.7.7.7/tcp/3/p2p/{s}")
    through += (f"/ip4/8.8.8.8/tcp/3/p2p/{rsa}",)
    places = split(("/ip4/5.5.5.5/tcp/1", *(f"{place}/p2p-circuit" for place in through)))
    assert places.direct == ("/ip4/5.5.5.5/tcp/1",)
    assert places.through == {r: ("/ip4/6.6.6.6/tcp/2",), s: ("/ip4/7.7.7.7/tcp/3",)}


def test_what_is_published_and_in_which_order():
    listen = ("/ip4/127.0.0.1/tcp/1", *LISTEN)
    circuit = "/ip4/5.5.5.5/tcp/1/p2p/R/p2p-circuit"
    assert publishable(listen, KEPT, (circuit,)) == (*KEPT, circuit, *LISTEN)
    assert publishable(listen[:1], (), ()) == listen[:1]


@pytest.mark.parametrize(
    ("peers", "ahead"),
    [
        ((), None),
        ((0.5,), 0.5),
        ((21_600.0,), 21_600.0),
        ((0.1, 21_600.0), 0.1),
        ((-21_600.0, 0.1), 0.0),
        ((21_600.0, 21_600.2), 21_600.0),
        ((0.1, 0.2, 21_600.0), 0.1),
        ((0.1, 21_600.0, 21_600.0), 0.1),
        ((-21_600.0, -21_599.0, -21_598.0), -21_598.0),
    ],
)
def test_one_wrong_clock_of_two_peers_does_not_make_ours_wrong(peers, ahead):
    """In a real run of three, one clock was 6 h ahead, and `doctor` failed on the two with the right time."""
    assert usual_ahead_s(peers) == ahead
