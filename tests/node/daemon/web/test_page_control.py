"""Orders by POST, as hostile neighbours of the page send them: each check alone keeps them out."""

import asyncio
import json
import time
from contextlib import suppress
from dataclasses import replace

import pytest

from atoll.node.daemon.web import server as module
from atoll.node.daemon.web.http_messages import BODY_MAX_BYTES, HttpRequest
from atoll.node.daemon.web.page_access import PageAccess
from atoll.node.daemon.web.page_control import PageControl, foreign
from atoll.node.daemon.web.server import has_loopback
from atoll.node.daemon.web.site import Site
from tests.node.daemon.web.fed_node import Node
from tests.node.daemon.web.steered_node import Steered
from tests.node.daemon.web.test_server import link, say, served
from tests.waiting import HANGS_S

PAUSE = {"type": "pause", "reason": "games", "for_s": 7200}

SOON_S = 20.0
"""A connection that is open for so long is not hung up on."""
ASKED = HttpRequest("/v1/order", {}, "", is_post=True, host="localhost", origin="http://localhost")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pauses; and no deadline ends what a busy machine does late."""
    monkeypatch.setattr(module, "PAUSE_MAX_S", 0.0)
    monkeypatch.setattr(module, "ACCEPT_S", 0.0)
    monkeypatch.setattr(module, "REQUEST_S", HANGS_S)
    monkeypatch.setattr(module, "WRITE_S", HANGS_S)


@pytest.fixture
def steered(node: Node) -> Steered:
    return Steered(node)


def post(path: str, *, bearer: str = "", body: bytes = b"", host="localhost:9", origin=None, more=()) -> bytes:
    """A request as the page's script sends it, unless told otherwise."""
    fields = [f"Host: {host}", f"Origin: {f'http://{host}' if origin is None else origin}"]
    fields += [f"Authorization: Bearer {bearer}", f"Content-Length: {len(body)}", *more]
    return "\r\n".join((f"POST {path} HTTP/1.1", *fields, "", "")).encode() + body


def order(session: str, ask: dict, **how) -> bytes:
    return post("/v1/order", bearer=session, body=json.dumps({"v": 1, "ask": ask}).encode(), **how)


async def begun(server, steered: Steered) -> str:
    got = await say(server, post("/v1/session", bearer=steered.access.issue()))
    assert got.startswith(b"HTTP/1.1 200 ")
    return json.loads(got.partition(b"\r\n\r\n")[2])["session"]


async def test_a_page_with_a_session_pauses_resumes_and_limits(steered):
    async with served(steered.site.answer) as server:
        session = await begun(server, steered)
        for ask in (PAUSE, {"type": "resume"}, {"type": "limit", "up": "20mbit", "down": None}):
            got = await say(server, order(session, ask))
            assert got.startswith(b"HTTP/1.1 200 ")
            assert b'"type":"done"' in got
            assert b"Access-Control" not in got
    assert steered.orders == ["pause games 7200.0", "resume", "limit 20mbit None"]


async def test_a_token_works_once_and_its_second_use_ends_the_session(steered):
    async with served(steered.site.answer) as server:
        token = steered.access.issue()
        got = await say(server, post("/v1/session", bearer=token))
        session = json.loads(got.partition(b"\r\n\r\n")[2])["session"]
        assert (await say(server, order(session, PAUSE))).startswith(b"HTTP/1.1 200 ")
        again = await say(server, post("/v1/session", bearer=token))
        assert again.startswith(b"HTTP/1.1 403 ")
        assert b"atoll web" in again
        assert (await say(server, order(session, PAUSE))).startswith(b"HTTP/1.1 401 ")
    assert len(steered.orders) == 1


@pytest.mark.parametrize("bearer", ["", "x", "A" * 32])
async def test_without_a_session_nothing_is_ordered(steered, bearer):
    async with served(steered.site.answer) as server:
        token = steered.access.issue()
        for secret in (bearer, token):
            assert (await say(server, order(secret, PAUSE))).startswith(b"HTTP/1.1 401 ")
        assert (await say(server, post("/v1/session", bearer=bearer))).startswith(b"HTTP/1.1 403 ")
        twice = (f"Authorization: Bearer {token}",)
        assert (await say(server, post("/v1/session", bearer=token, more=twice))).startswith(b"HTTP/1.1 403 ")
    assert steered.orders == []


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "", "http://localhost:8000", "https://localhost:9", "http://127.0.0.1:9"],
)
async def test_another_origin_orders_nothing(steered, origin):
    """A page of a stranger, of another program on this machine, and a form, which sends `null` or nothing."""
    async with served(steered.site.answer) as server:
        session = await begun(server, steered)
        assert (await say(server, order(session, PAUSE, origin=origin))).startswith(b"HTTP/1.1 403 ")
        token = steered.access.issue()
        assert (await say(server, post("/v1/session", bearer=token, origin=origin))).startswith(b"HTTP/1.1 403 ")
        assert steered.access.begin(token), "it was not used up"
    assert steered.orders == []


@pytest.mark.parametrize("host", ["evil.example:9", "192.0.2.7:9", "[2001:db8::1]:9", "0.0.0.0:9"])
async def test_a_host_that_is_not_loopback_orders_nothing(steered, host):
    """DNS rebinding: the stranger's page is its own origin, by its name or by an address."""
    async with served(steered.site.answer) as server:
        session = await begun(server, steered)
        assert (await say(server, order(session, PAUSE, host=host))).startswith(b"HTTP/1.1 403 ")
    assert steered.orders == []


@pytest.mark.parametrize("host", ["localhost:9", "LOCALHOST", "127.0.0.1:9", "127.9.9.9", "[::1]:9"])
def test_the_page_itself_may_order(host):
    asked = replace(ASKED, host=host, origin=f"http://{host}", is_from_loopback=True)
    assert foreign(asked) == ""
    assert "on this machine" in foreign(replace(asked, is_from_loopback=False))


async def test_a_peer_that_is_not_on_this_machine_orders_nothing(steered, monkeypatch):
    """The same bytes, over a connection whose other end is another machine's."""
    async with served(steered.site.answer) as server:
        session = await begun(server, steered)
        monkeypatch.setattr(module, "is_from_loopback", lambda link: False)
        assert (await say(server, order(session, PAUSE))).startswith(b"HTTP/1.1 403 ")
    assert steered.orders == []


class _Link:
    """A socket whose other end is where the test says."""

    def __init__(self, ip: str) -> None:
        self.ip = ip

    def getpeername(self) -> tuple[str, int]:
        return self.ip, 4711


@pytest.mark.parametrize(
    ("ip", "is_near"), [("127.0.0.1", True), ("::1", True), ("192.0.2.7", False), ("172.17.0.1", False)]
)
def test_who_is_near(ip, is_near):
    assert module.is_from_loopback(_Link(ip)) is is_near


@pytest.mark.parametrize(
    "ask",
    [
        {"type": "stop"},
        {"type": "exclude", "peer": "abcdef"},
        {"type": "eval"},
        {"type": "logs"},
        {"type": "page"},
        {"type": "status"},
        {"type": "pause", "reason": "\x1b[2J"},
        {"type": "pause", "for_s": -1},
        {"type": "limit", "up": "9" * 65},
        {"type": "format-disk"},
        [],
    ],
)
async def test_what_is_no_order_of_a_page_is_refused(steered, ask):
    async with served(steered.site.answer) as server:
        session = await begun(server, steered)
        assert b'"type":"refused"' in await say(server, order(session, ask))
        for junk in (b"", b"\xff", b"[" * BODY_MAX_BYTES):
            assert b'"type":"refused"' in await say(server, post("/v1/order", bearer=session, body=junk))
    assert steered.orders == []


async def test_a_body_above_the_cap_is_not_read(steered, monkeypatch):
    """Nothing of the body was sent: the answer comes from the head alone."""
    monkeypatch.setattr(module, "REQUEST_S", 1e6)
    head = post("/v1/order", body=b"x" * (BODY_MAX_BYTES + 1))[: -(BODY_MAX_BYTES + 1)]
    async with served(steered.site.answer) as server, asyncio.timeout(SOON_S):
        assert (await say(server, head)).startswith(b"HTTP/1.1 413 ")
        assert (await say(server, head.replace(b"Content-Length", b"X"))).startswith(b"HTTP/1.1 411 ")
        chunked = head.replace(b"Content-Length: 1025", b"Transfer-Encoding: chunked")
        assert (await say(server, chunked)).startswith(b"HTTP/1.1 400 ")


async def test_who_sends_its_body_slowly_is_hung_up_on(steered, monkeypatch):
    async with served(steered.site.answer) as server:
        session = await begun(server, steered)
        monkeypatch.setattr(module, "REQUEST_S", 0.05)
        reader, writer = await link(server)
        writer.write(order(session, PAUSE)[:-1])
        with suppress(ConnectionError):
            async with asyncio.timeout(SOON_S):
                assert await reader.read() == b""
        writer.close()
    assert steered.orders == []


async def test_a_node_without_control_takes_no_orders(node):
    async with served(Site(node).answer) as server:
        assert (await say(server, post("/v1/session", bearer="x"))).startswith(b"HTTP/1.1 403 ")


async def test_orders_go_only_where_orders_go(steered):
    async with served(steered.site.answer) as server:
        session = await begun(server, steered)
        for path in ("/", "/v1/data.json", "/v1/order?x=1", "/metrics"):
            assert (await say(server, post(path, bearer=session))).startswith(b"HTTP/1.1 405 ")
        for path in (b"/v1/order", b"/v1/session"):
            got = await say(server, b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % path)
            assert got.startswith(b"HTTP/1.1 404 ")


def test_a_secret_is_in_no_log(steered, caplog):
    caplog.set_level("INFO")
    token = steered.access.issue()
    asked = replace(ASKED, path="/v1/session", bearer=token)
    assert token not in repr(asked)
    control = PageControl(steered.access, steered)
    reply = asyncio.run(control.answer(replace(asked, is_from_loopback=True)))
    session = json.loads(reply.body)["session"]
    assert asyncio.run(control.answer(replace(asked, is_from_loopback=True))).status == 403
    assert token not in caplog.text
    assert session not in caplog.text
    assert "a page may steer this node now" in caplog.text


@pytest.mark.parametrize(
    ("text", "is_it"),
    [("127.0.0.1:0", True), ("localhost:1", True), ("[::1]:1", True), ("0.0.0.0:1", True), ("[::]:1", True),
     ("192.0.2.7:1", False), ("", True)],
)  # fmt: skip
def test_which_pages_a_browser_of_this_machine_reaches_by_loopback(text, is_it):
    assert has_loopback(text) is is_it


def test_real_secrets_are_long():
    import secrets

    access = PageAccess(time.monotonic, secrets.token_bytes)
    assert len({access.issue() for _ in range(8)}) == 8
    assert len(access.issue()) == 32
