"""What a dashboard draws: all of it once, then what is new, and no addresses."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.daemon.web import site
from atoll.node.daemon.web.site import DashboardData, next_since, redact_addresses
from atoll.protocols.local.control_messages import PeerStatus, RoundStatus, Status


async def ask(node, **query: str) -> DashboardData:
    answer = await site.data_reply(node, query)
    assert (answer.status, answer.content_type) == (200, "application/json")
    return msgspec.json.decode(answer.body, type=DashboardData)


async def test_it_has_the_fields_of_the_control_socket(node):
    answer = await site.data_reply(node, {})
    shown = json.loads(answer.body)
    assert set(shown) == {"v", "status", "peers", "rounds", "next"}
    assert set(shown["status"]) == {"type", *Status.__struct_fields__}
    assert set(shown["peers"][0]) == set(PeerStatus.__struct_fields__)
    assert set(shown["rounds"][0]) == set(RoundStatus.__struct_fields__)
    assert shown["status"]["goodput"]["window"]["steps_s"] == 95.0
    assert shown["status"]["val_bpb"] is None


async def test_addresses_are_left_out(node):
    node.now = msgspec.structs.replace(
        node.now, seeds={"/dns4/seed.example/tcp/1/p2p/x": "refused"}, trouble="203.0.113.9:4710 is taken",
        reason="waiting: /dns4/seed.example/tcp/1/p2p/x refused by [2001:db8::7]:99"
    )  # fmt: skip
    answer = await site.data_reply(node, {})
    for secret in (b"192.0.2", b"198.51.100", b"203.0.113", b"seed.example", b"2001:db8"):
        assert secret not in answer.body
    status = (await ask(node)).status
    assert status.reachability_why == "dialled back at /ip4/…/tcp/4710"
    assert status.reason == "waiting: /dns4/…/tcp/1/p2p/x refused by …:99"


@pytest.mark.parametrize(
    "text", ["waiting for 1 of 4: …abcdef", "goes on at 12:30", "final 5, round 6: folding", ""]
)
def test_sentences_without_addresses_stay(text):
    assert redact_addresses(text) == text


@given(st.ip_addresses())
def test_no_address_is_left(address):
    written = f"{address}" if address.version == 4 else f"[{address}]"
    assert redact_addresses(f"seen as {written}:4710, twice") == "seen as …:4710, twice"
    assert redact_addresses(f"at {address}") == "at …"
    assert redact_addresses(f"/ip{address.version}/{address}/tcp/1") == f"/ip{address.version}/…/tcp/1"


async def test_who_follows_the_cursor_has_what_who_asks_anew_has(node):
    node.rows = []
    held: dict[int, RoundStatus] = {}
    cursor = 0
    for number in range(30):
        node.row(number, final=False)
        if number % 3 == 2:  # finality comes in leaps, and late
            node.rows[:-2] = [msgspec.structs.replace(row, final=True) for row in node.rows[:-2]]
        node.rows[-2:] = [msgspec.structs.replace(row, steps_s=row.steps_s + 1.0) for row in node.rows[-2:]]
        news = await ask(node, since=str(cursor))
        held |= {row.round: row for row in news.rounds}
        cursor = news.next
        assert len(news.rounds) <= 9
        assert tuple(held.values()) == (await ask(node)).rounds


async def test_answers_have_an_end(node):
    node.rows = []
    for number in range(site.ROUNDS_MAX + 50):
        node.row(number)
    node.known = [
        msgspec.structs.replace(node.known[0], peer=f"p{number:04}", path="", member=False)
        for number in range(2000)
    ]
    node.known[1234] = msgspec.structs.replace(node.known[1234], path="direct")
    got = await ask(node)
    assert [row.round for row in got.rounds] == list(range(50, site.ROUNDS_MAX + 50))
    assert len(got.peers) == site.PEERS_MAX
    assert got.peers[0].peer == "p1234"


def test_nothing_new_keeps_the_cursor():
    assert next_since((), 17) == 17


@pytest.mark.parametrize("since", ["", "-1", "x", "1e3", "9" * 10, "１"])
async def test_a_cursor_that_is_none(node, since):
    assert (await site.data_reply(node, {"since": since})).status == 400
