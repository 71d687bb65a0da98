"""What a dashboard draws: all of it once, then what is new, and no addresses."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.daemon.web.http_messages import HttpReply, HttpRequest
from atoll.node.daemon.web.older_rounds import thin
from atoll.node.daemon.web.page_data import CurvePoint, DashboardData, InviteView, SampleText
from atoll.node.daemon.web.site import (
    PEERS_MAX,
    ROUNDS_MAX,
    WORK_ROUNDS,
    Site,
    next_since,
    qr_rows,
    redact_addresses,
)
from atoll.protocols.local.control_messages import PeerStatus, RoundStatus, Status
from tests.node.daemon.web.fed_node import ROUND_ROW


async def reply(node, path: str = "/v1/data.json", **query: str) -> HttpReply:
    return await Site(node).answer(HttpRequest(path, query, "*/*"))


async def ask(node, **query: str) -> DashboardData:
    answer = await reply(node, **query)
    assert (answer.status, answer.content_type) == (200, "application/json")
    return msgspec.json.decode(answer.body, type=DashboardData)


async def test_it_has_the_fields_of_the_control_socket(node):
    answer = await reply(node)
    shown = json.loads(answer.body)
    assert set(shown) == set(DashboardData.__struct_fields__)
    assert set(shown["status"]) == {"type", *Status.__struct_fields__}
    assert set(shown["peers"][0]) == set(PeerStatus.__struct_fields__)
    assert set(shown["rounds"][0]) == set(RoundStatus.__struct_fields__)
    assert shown["status"]["goodput"]["window"]["steps_s"] == 95.0
    assert shown["status"]["val_bpb"] is None


async def test_how_long_nothing_moved_is_what_the_daemon_says(node):
    node.still = 12.5
    assert (await ask(node)).pace.still_s == 12.5


async def test_addresses_are_left_out(node):
    node.now = msgspec.structs.replace(
        node.now, seeds={"/dns4/seed.example/tcp/1/p2p/x": "refused"}, trouble="203.0.113.9:4710 is taken",
        reason="waiting: /dns4/seed.example/tcp/1/p2p/x refused by [2001:db8::7]:99"
    )  # fmt: skip
    answer = await reply(node)
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
    for number in range(ROUNDS_MAX + 50):
        node.row(number)
    node.known = [
        msgspec.structs.replace(node.known[0], peer=f"p{number:04}", path="", member=False)
        for number in range(2000)
    ]
    node.known[1234] = msgspec.structs.replace(node.known[1234], path="direct")
    got = await ask(node)
    assert [row.round for row in got.rounds] == list(range(50, ROUNDS_MAX + 50))
    assert len(got.peers) == PEERS_MAX
    assert got.peers[0].peer == "p1234"


def test_nothing_new_keeps_the_cursor():
    assert next_since((), 17) == 17


@pytest.mark.parametrize("since", ["", "-1", "x", "1e3", "9" * 10, "１"])
async def test_a_cursor_that_is_none(node, since):
    assert (await reply(node, since=since)).status == 400
    assert (await reply(node, log=since)).status == 400
    assert (await reply(node, event=since)).status == 400


async def test_the_log_comes_once_without_addresses_and_on_this_machine_only(node):
    first = await ask(node)
    assert [line.message for line in first.log.lines] == ["joined …:4710"]
    node.lines.append(msgspec.structs.replace(node.lines[0], message="<b>second</b>"))
    news = await ask(node, log=str(first.log.next))
    assert [line.message for line in news.log.lines] == ["<b>second</b>"]
    node.is_local = False
    elsewhere = await ask(node)
    assert (elsewhere.log.next, elsewhere.log.lines) == (0, ())


async def test_events_come_once_without_addresses_and_on_this_machine_only(node):
    first = await ask(node)
    assert [(one.event, one.text) for one in first.events.lines] == [("trouble", "error=…:4710 is taken")]
    node.events.append(msgspec.structs.replace(node.events[0], event="final", text="round=3"))
    news = await ask(node, event=str(first.events.next))
    assert [(one.event, one.text) for one in news.events.lines] == [("final", "round=3")]
    assert (await ask(node, event=str(news.events.next))).events.lines == ()
    node.is_local = False
    elsewhere = await ask(node)
    assert (elsewhere.events.next, elsewhere.events.lines) == (0, ())


async def test_an_invite_is_shown_on_this_machine_only_and_its_code_is_of_the_link(node):
    view = msgspec.json.decode((await reply(node, "/v1/invite.json")).body, type=InviteView)
    assert (view.link, view.qr) == (node.link, qr_rows(node.link))
    assert len(view.qr) == len(view.qr[0]) > 25
    assert {"".join(sorted(set(row))) for row in view.qr[:4]} == {"0"}, "the quiet zone"
    node.is_local = False
    view = msgspec.json.decode((await reply(node, "/v1/invite.json")).body, type=InviteView)
    assert (view.link, view.qr) == ("", ())
    assert "other machines" in view.why
    node.is_local, node.link = True, ""
    view = msgspec.json.decode((await reply(node, "/v1/invite.json")).body, type=InviteView)
    assert view.why.startswith("an invite of this run is a secret")


async def test_work_is_of_the_newest_rounds_that_are_sent(node):
    node.rows = []
    for number in range(WORK_ROUNDS + 10):
        node.row(number)
    assert [found.round for found in (await ask(node)).work] == list(range(10, WORK_ROUNDS + 10))
    news = await ask(node, since="30")
    assert [found.round for found in news.work] == [row.round for row in news.rounds] == [30, 31, 32, 33]


async def test_older_rounds_come_with_the_first_answer_only_and_thinned_out(node):
    node.rows = []
    for number in range(ROUNDS_MAX + 5):
        node.row(number)
    first = await ask(node)
    assert [(point.round, point.tokens) for point in first.older] == [(at, (at + 1) * 8192) for at in range(5)]
    assert first.rounds[0].round == 5
    assert (await ask(node, since="300")).older is None
    node.rows = []
    assert (await ask(node)).older == ()


@given(st.integers(0, 500), st.integers(1, 60))
def test_a_thinned_curve_has_all_tokens_and_keeps_the_order(count, most):
    rows = [msgspec.structs.replace(ROUND_ROW, round=at, tokens=at, train_loss=float(at)) for at in range(count)]
    points = thin(rows, most)
    assert len(points) <= most
    assert [point.round for point in points] == sorted({point.round for point in points})
    assert all(point.tokens == sum(range(point.round + 1)) for point in points)
    assert (points[-1].round if points else -1) == count - 1
    assert all(point.train_loss <= point.round for point in points)


def test_a_point_has_the_mean_loss_and_the_newest_validation():
    losses, found = (2.0, None, 4.0), (None, 9.0, 8.0)
    rows = [
        msgspec.structs.replace(ROUND_ROW, round=at, train_loss=losses[at], val_bpb=found[at]) for at in range(3)
    ]
    assert thin(rows, 1) == (CurvePoint(round=2, tokens=3 * 8192, train_loss=3.0, val_bpb=8.0),)
    assert thin(rows[1:2], 1)[0].train_loss is None


async def test_a_sample_text_is_shown_on_this_machine_only(node):
    """A model repeats what it was trained on."""
    assert (await ask(node)).sample == node.text
    node.is_local = False
    assert (await ask(node)).sample == SampleText(why="not shown to other machines")
    assert b"To be" not in (await reply(node)).body
