"""The control socket: private, bounded, and not stopped by operators that misbehave."""

import asyncio
import errno
import json
import os
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import uvloop

from atoll.node.daemon import control_server as control
from atoll.node.daemon.control_server import ControlServer
from atoll.protocols.errors import LocalFault
from atoll.protocols.local.control_messages import EvaluationResult, PeerStatus, RoundStatus, Status
from tests.waiting import HANGS_S, eventually


class Operator:
    """Answers evaluations only; `asked` says that one began, `release` lets them end."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.release = asyncio.Event()
        self.cancelled = False

    def status(self) -> Status:
        raise LocalFault("no status here")

    async def peers(self) -> Sequence[PeerStatus]:
        return ()

    def rounds(self, last: int) -> Sequence[RoundStatus]:
        return ()

    async def stop(self, *, finish: bool) -> str:
        return str(finish)

    async def pause(self, reason: str, for_s: float | None) -> str:
        return reason

    async def resume(self) -> str:
        return ""

    async def evaluate(self) -> EvaluationResult:
        self.asked.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return EvaluationResult(1, 2.0, 3.0)


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[Path, Operator]]:
    async with serving(folder) as (server, operator):
        yield server.socket.path, operator


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[ControlServer, Operator]]:
    operator, ready = Operator(), asyncio.Event()
    server = ControlServer(folder / "control.sock", folder / "node.log", operator)
    async with asyncio.timeout(HANGS_S), asyncio.TaskGroup() as group:
        task = group.create_task(server.serve(ready.set))
        await ready.wait()
        yield server, operator
        task.cancel()


async def say(path: Path, *lines: bytes, answers: int = 1) -> list[dict]:
    """What the server answers to `lines` sent at once."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.writelines(lines)
    found = [json.loads(line)["answer"] for line in [await reader.readline() for _ in range(answers)] if line]
    writer.close()
    await writer.wait_closed()
    return found


PEERS = b'{"v":1,"ask":{"type":"peers"}}\n'


async def test_socket_is_private_and_goes_away(tmp_path):
    async with served(tmp_path) as (path, _):
        assert path.stat().st_mode & 0o777 == 0o600
    assert not path.exists()


async def test_a_disk_that_became_read_only_keeps_the_socket_and_ends_nothing_else(tmp_path, monkeypatch):
    async with served(tmp_path) as (path, _):
        refuses = OSError(errno.EROFS, "Read-only file system")
        monkeypatch.setattr(Path, "rename", lambda *_, **__: (_ for _ in ()).throw(refuses))
    assert path.exists()


class Credentials:
    """What the kernel says of who connects: the real words, with another uid."""

    size = control._CREDENTIALS.size

    def __init__(self, uid):
        self.uid = uid

    def unpack(self, raw):
        pid, _, gid = struct.Struct("3i").unpack(raw)
        assert pid == os.getpid()
        return pid, self.uid, gid


async def test_a_disk_that_takes_no_new_file_can_still_show_that_the_last_line_is_lost(tmp_path):
    async with serving(tmp_path) as (server, _):
        path = tmp_path / "control.sock"
    assert not path.exists()
    server.socket.remove(is_end_lost=True)
    assert path.is_socket(), "as after a kill: `stop --wait` is no success"


async def test_nothing_of_the_socket_stays_after_an_end_that_was_written(tmp_path):
    async with serving(tmp_path) as (server, _):
        pass
    server.socket.remove(is_end_lost=False)
    assert list(tmp_path.iterdir()) == []


async def test_another_user_is_hung_up_even_if_the_file_lets_it_in(tmp_path, monkeypatch):
    async with served(tmp_path) as (path, _):
        for uid, answers in ((os.geteuid(), 1), (0, 1), (os.geteuid() + 1, 0), (65534, 0)):
            monkeypatch.setattr(control, "_CREDENTIALS", Credentials(uid))
            said = []
            with suppress(OSError):
                said = await say(path, PEERS)
            assert len(said) == answers


async def test_a_dead_nodes_socket_is_replaced(tmp_path):
    (tmp_path / "control.sock").touch()
    async with served(tmp_path) as (path, _):
        assert await say(path, PEERS) == [{"type": "peers", "peers": []}]


async def test_a_connection_carries_many_requests(tmp_path):
    async with served(tmp_path) as (path, _):
        pause = b'{"v":1,"ask":{"type":"pause","reason":"games"}}\n'
        answers = await say(path, PEERS, pause, PEERS, answers=3)
        assert [answer["type"] for answer in answers] == ["peers", "done", "peers"]
        assert answers[1]["message"] == "games"


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"not json\n",
        b"[]\n",
        b'{"v":1}\n',
        b'{"v":2,"ask":{"type":"peers"}}\n',
        b'{"v":1,"ask":{"type":"format-disk"}}\n',
        b'{"v":1,"ask":{"type":"rounds","last":0}}\n',
        b'{"v":1,"ask":{"type":"watch","interval_s":0}}\n',
        b'{"v":1,"ask":{"type":"logs","tail":-1}}\n',
        b'{"v":1,"ask":{"type":"pause","reason":"\\u001b[2J"}}\n',
        b'{"v":1,"ask":{"type":"exclude","peer":"abcdef","reason":"\\u001b[2J"}}\n',
        b'{"v":1,"ask":{"type":"exclude","peer":"abcdef","first":-1}}\n',
        b'{"v":1,"ask":' + b"[" * 5000 + b"\n",
        b"\xff\xfe\n",
    ],
)
async def test_nonsense_is_refused_and_the_connection_goes_on(tmp_path, line):
    async with served(tmp_path) as (path, _):
        first, second = await say(path, line, PEERS, answers=2)
        assert (first["type"], first["fault"]) == ("refused", "DecodeError")
        assert second["type"] == "peers"


async def test_a_line_without_end_is_hung_up_on(tmp_path):
    async with served(tmp_path) as (path, _):
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(b"x" * 300_000)
        with suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        assert len(await say(path, PEERS)) == 1


async def test_errors_of_the_operator_are_refusals(tmp_path):
    async with served(tmp_path) as (path, _):
        (answer,) = await say(path, b'{"v":1,"ask":{"type":"status"}}\n')
        assert answer == {"type": "refused", "fault": "LocalFault", "message": "no status here", "hint": ""}


async def test_too_many_operators_are_turned_away(tmp_path, monkeypatch):
    monkeypatch.setattr(control, "MAX_CONNECTIONS", 2)
    async with served(tmp_path) as (path, operator):
        links = [await asyncio.open_unix_connection(str(path)) for _ in range(2)]
        for _, writer in links:
            writer.write(b'{"v":1,"ask":{"type":"eval"}}\n')
        (refused,) = await say(path, PEERS)
        assert (refused["type"], refused["fault"]) == ("refused", "LocalFault")
        assert "programs are connected to this node already" in refused["message"]
        operator.release.set()
        for reader, writer in links:
            assert json.loads(await reader.readline())["answer"]["val_bpb"] == 2.0
            writer.write_eof()
            assert await reader.read() == b"", "the server has let go"
            writer.close()
            await writer.wait_closed()
        assert (await say(path, PEERS))[0]["type"] == "peers"


async def test_one_slow_request_does_not_hold_up_others(tmp_path):
    async with served(tmp_path) as (path, operator):
        _, writer = await asyncio.open_unix_connection(str(path))
        writer.write(b'{"v":1,"ask":{"type":"eval"}}\n')
        assert len(await say(path, PEERS)) == 1
        writer.close()
    assert operator.cancelled, "ending the server ends its requests"


async def test_an_operator_that_does_not_read_is_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(control, "WRITE_S", 0.05)
    (tmp_path / "node.log").write_text(("x" * 400 + "\n") * 9_000)
    async with serving(tmp_path) as (server, _):
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "control.sock"), limit=1024)
        writer.write(b'{"v":1,"ask":{"type":"logs","tail":9000}}\n')
        await eventually(lambda: server._open)
        await eventually(lambda: not server._open)
        total = 0
        with suppress(ConnectionError):
            while data := await reader.read(1 << 20):
                total += len(data)
        assert total < 3_600_000
        writer.close()


def test_one_that_hangs_up_before_its_answer_ends_nothing(tmp_path, monkeypatch):
    """It leaves an answer unread, so its end is a reset; closed sockets raise on the loop of `node start`."""

    sessions: list[asyncio.StreamWriter] = []
    monkeypatch.setattr(control, "_same_user", lambda writer: sessions.append(writer) is None)

    async def hang_up() -> None:
        async with serving(tmp_path) as (server, operator):
            path = str(tmp_path / "control.sock")
            with socket.socket(socket.AF_UNIX) as operators:
                operators.connect(path)
                operators.sendall(PEERS + b'{"v":1,"ask":{"type":"eval"}}\n')
                await operator.asked.wait()
            with suppress(OSError):
                await sessions[0].wait_closed()
            operator.release.set()
            await eventually(lambda: not server._open)
            assert len(await say(Path(path), PEERS)) == 1

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(hang_up())


async def test_one_that_is_gone_before_it_is_looked_at_is_hung_up(tmp_path):
    ours, theirs = socket.socketpair()
    _, writer = await asyncio.open_unix_connection(sock=theirs)
    writer.transport.abort()
    await asyncio.sleep(0)
    assert not control._same_user(writer)
    ours.close()


async def test_a_folder_that_is_gone_is_a_local_fault(tmp_path):
    with pytest.raises(LocalFault, match="cannot open the control socket"):
        await ControlServer(tmp_path / "no" / "control.sock", tmp_path / "log", Operator()).serve()


async def test_a_connection_that_comes_while_the_server_ends_is_hung_up(tmp_path):
    operator, ready = Operator(), asyncio.Event()
    server = ControlServer(tmp_path / "c.sock", tmp_path / "node.log", operator)
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_unix_connection(sock=theirs)
    operator_asks = b'{"v":1,"ask":{"type":"eval"}}\n'
    async with asyncio.timeout(HANGS_S), asyncio.TaskGroup() as group:
        serving = group.create_task(server.serve(ready.set))
        await ready.wait()
        busy, session = await asyncio.open_unix_connection(str(tmp_path / "c.sock"))
        session.write(operator_asks)
        await operator.asked.wait()
        serving.cancel()
        await asyncio.sleep(0)  # the group ends, its session is still there
        assert not serving.done()
        server._accept(reader, writer)
        assert writer.transport.is_closing()
        assert not await busy.read()
    session.close()
    ours.close()
