"""The web server on loopback: bounded, and not stopped by anybody who reaches it."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from prometheus_client.parser import text_string_to_metric_families

from atoll.node.daemon.web import server as module
from atoll.node.daemon.web.http_messages import HEAD_MAX_BYTES, HttpReply, HttpRequest
from atoll.node.daemon.web.server import Answer, ListenAddress, WebServer
from atoll.node.daemon.web.site import Site
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.errors import LocalFault
from atoll.protocols.local.control_messages import Status
from tests.waiting import HANGS_S, eventually

LOOPBACK = ListenAddress("127.0.0.1", 0)
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def ok(_: HttpRequest) -> HttpReply:
    return HttpReply(b"ok")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pauses; and no deadline ends what a busy machine does late."""
    monkeypatch.setattr(module, "PAUSE_MAX_S", 0.0)
    monkeypatch.setattr(module, "ACCEPT_S", 0.0)
    monkeypatch.setattr(module, "REQUEST_S", HANGS_S)
    monkeypatch.setattr(module, "WRITE_S", HANGS_S)


@asynccontextmanager
async def served(answer: Answer = ok, place: ListenAddress | None = LOOPBACK) -> AsyncIterator[WebServer]:
    server = WebServer(place, answer, time.monotonic)
    async with asyncio.timeout(HANGS_S), asyncio.TaskGroup() as group:
        serving = group.create_task(server.serve())
        while place and not server.url and not server.trouble:  # noqa: ASYNC110
            await asyncio.sleep(0)
        yield server
        serving.cancel()


async def link(server: WebServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(server.url.rstrip("/").rpartition(":")[2]))


async def say(server: WebServer, sent: bytes) -> bytes:
    """All that the server answers; empty when it hangs up."""
    reader, writer = await link(server)
    try:
        writer.write(sent)
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_a_head_without_end_is_hung_up_on_at_its_cap_and_not_at_its_deadline(monkeypatch):
    monkeypatch.setattr(module, "REQUEST_S", 1e6)
    async with served() as server:
        assert await say(server, b"GET / HTTP/1.1\r\nHost: " + b"x" * (4 * HEAD_MAX_BYTES)) == b""


async def test_a_scrape(node):
    async with served(Site(node).answer) as server:
        got = await say(server, b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:9\r\nAccept: text/plain\r\n\r\n")
    head, _, body = got.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert b"default-src 'none'" in head
    assert b"Access-Control" not in head
    assert {family.name for family in text_string_to_metric_families(body.decode())} >= {
        "atoll_time_seconds",
        "atoll_state",
    }


async def test_nothing_else_is_there(node):
    async with served(Site(node).answer) as server:
        for path in (b"/metrics/", b"/../etc/passwd", b"/v1/stop", b"//metrics"):
            assert (await say(server, b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % path)).startswith(
                b"HTTP/1.1 404 "
            )


async def test_no_address_no_server():
    async with served(place=None) as server:
        await asyncio.sleep(0)
    assert server.url == ""


@pytest.mark.parametrize(
    ("sent", "begins"),
    [
        (b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", b"HTTP/1.1 403 Forbidden\r\n"),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"HTTP/1.1 405 Method Not Allowed\r\n"),
        (b"\x00\xff\r\n\r\n", b"HTTP/1.1 400 Bad Request\r\n"),
        (b"x" * (HEAD_MAX_BYTES * 3), b""),
        (b"GET / HTTP/1.1\r\nA: " + b"x" * HEAD_MAX_BYTES + b"\r\n\r\n", b""),
    ],
)
async def test_nonsense_gets_a_refusal_or_nothing_and_the_server_goes_on(sent, begins):
    async with served() as server:
        got = await say(server, sent)
        assert got.startswith(begins)
        assert got or not begins
        assert (await say(server, GET)).endswith(b"\r\n\r\nok")


async def test_who_asks_slowly_is_hung_up_on(monkeypatch):
    monkeypatch.setattr(module, "REQUEST_S", 0.05)
    async with served() as server:
        reader, writer = await link(server)
        writer.write(GET[:20])
        with suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        monkeypatch.setattr(module, "REQUEST_S", HANGS_S)
        assert (await say(server, GET)).endswith(b"ok")


async def test_who_does_not_read_is_dropped(monkeypatch):
    monkeypatch.setattr(module, "WRITE_S", 0.05)

    async def much(_: HttpRequest) -> HttpReply:
        return HttpReply(b"x" * 20_000_000)

    async with served(much) as server:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", int(server.url.rstrip("/").rpartition(":")[2]), limit=1024
        )
        writer.write(GET)
        idle = module.MAX_CONNECTIONS - 1
        while server._slots._value >= idle:  # noqa: ASYNC110 - it has no waiters
            await asyncio.sleep(0)
        await eventually(lambda: server._slots._value >= idle)
        total = 0
        with suppress(ConnectionError):
            while data := await reader.read(1 << 20):
                total += len(data)
        assert total < 20_000_000
        writer.close()


async def test_who_comes_when_all_slots_are_taken_waits():
    async with served() as server:
        links = [await link(server) for _ in range(module.MAX_CONNECTIONS)]
        while not server._slots.locked():  # noqa: ASYNC110
            await asyncio.sleep(0)
        reader, writer = await link(server)
        writer.write(GET)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await reader.read(1)
        links.pop()[1].close()
        assert (await reader.read()).endswith(b"ok")
        for _, other in (*links, (reader, writer)):
            other.close()


async def test_a_flood_of_connections_is_taken_slowly(monkeypatch):
    monkeypatch.setattr(module, "ACCEPT_S", 60.0)
    async with served() as server:
        assert (await say(server, GET)).endswith(b"ok")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await say(server, GET)


async def test_a_bug_or_a_fault_in_an_answer_ends_its_request_only():
    wrong: list[Exception] = [ValueError("secret"), LocalFault("the node is busy")]

    async def fails(_: HttpRequest) -> HttpReply:
        if wrong:
            raise wrong.pop(0)
        return HttpReply(b"ok")

    async with served(fails) as server:
        assert await say(server, GET) == b""
        assert (await say(server, GET)).startswith(b"HTTP/1.1 503 ")
        assert (await say(server, GET)).endswith(b"ok")


def test_after_a_dear_answer_the_next_one_waits(monkeypatch):
    """An answer that takes 20 ms of the loop is followed by a pause of 400 ms."""
    monkeypatch.setattr(module, "PAUSE_MAX_S", 1.0)
    readings = iter((10.0, 10.02, 10.02, 10.021))
    server = WebServer(None, ok, lambda: next(readings))

    async def ask_twice() -> list[float]:
        times = []
        for _ in range(2):
            assert (await server._reply(HttpRequest("/", {}, ""))).body == b"ok"
            times.append(asyncio.get_running_loop().time())
        return times

    assert run_virtual(ask_twice()) == pytest.approx([0.4, 0.42])


async def test_an_address_that_is_taken_is_tried_again(monkeypatch):
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    async with served() as first:
        place = ListenAddress("127.0.0.1", int(first.url.rstrip("/").rpartition(":")[2]))
        second = WebServer(place, ok, time.monotonic)
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(second.serve())
            while not second.trouble:  # noqa: ASYNC110
                await asyncio.sleep(0)
            assert str(place) in second.trouble
            assert second.url == ""
            serving.cancel()
    async with served(place=place) as again:
        assert (again.url, again.trouble) == (f"http://{place}/", "")


async def test_status_that_cannot_be_told_is_no_end(node, monkeypatch):
    def not_yet() -> Status:
        raise LocalFault("not yet")

    monkeypatch.setattr(node, "status", not_yet)
    async with served(Site(node).answer) as server:
        assert (await say(server, GET.replace(b"/ ", b"/metrics ", 1))).startswith(b"HTTP/1.1 503 ")
