"""The service manager is told readiness and signs of life over a real socket; without it nothing breaks."""

import asyncio
import contextlib
import logging
import socket

import pytest

from atoll.node.service.notify import Notice, notice_from, notifying
from tests.waiting import HANGS_S

SILENT_S = 40.0
"""Two thousand intervals of the test's watchdog, and less than a mutant may take."""


@pytest.fixture
def manager(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
        link.bind(str(tmp_path / "notify"))
        link.settimeout(HANGS_S)
        yield link


def address(manager: socket.socket) -> str:
    return str(manager.getsockname())


def asked(manager: socket.socket, **more: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": address(manager), "PATH": "/bin", **more}


def test_ready_and_stopping_are_told(manager):
    async def run() -> None:
        with notifying(notice_from(asked(manager), 7)) as ready:
            ready()

    asyncio.run(run())
    assert manager.recv(100).startswith(b"READY=1\nMAINPID=")
    assert manager.recv(100) == b"STOPPING=1"


def test_signs_of_life_come_while_the_loop_runs_and_end_where_it_hangs(manager):
    environ = asked(manager, WATCHDOG_USEC="40000", WATCHDOG_PID="7")
    manager.settimeout(SILENT_S)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        with notifying(notice_from(environ, 7)):
            for _ in range(4):
                assert await loop.run_in_executor(None, manager.recv, 100) == b"WATCHDOG=1"
            manager.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    manager.recv(100)
            with pytest.raises(BlockingIOError):
                hang(manager)
            manager.settimeout(SILENT_S)

    def hang(link: socket.socket) -> None:
        """Longer than two intervals, without giving the loop a turn."""
        end = asyncio.get_running_loop().time() + 0.1
        while asyncio.get_running_loop().time() < end:
            pass
        link.recv(100)

    asyncio.run(run())


@pytest.mark.parametrize(
    "more",
    [{}, {"WATCHDOG_USEC": "40000", "WATCHDOG_PID": "8"}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "soon"}],
)
def test_who_is_not_asked_for_signs_of_life_sends_none(manager, more):
    async def run() -> None:
        with notifying(notice_from(asked(manager, **more), 7)) as ready:
            await asyncio.to_thread(lambda: None)
            ready()

    asyncio.run(run())
    assert manager.recv(100).startswith(b"READY=1")


def test_children_are_not_asked_to_speak_for_the_node(manager):
    environ = asked(manager, WATCHDOG_USEC="40000", WATCHDOG_PID="7")
    notice_from(environ, 7)
    assert environ == {"PATH": "/bin"}


def test_nobody_who_listens_is_no_error(tmp_path, caplog):
    Notice("", None).ready()
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        Notice(str(tmp_path / "gone"), None).ready()
    assert "the service manager was not told READY=1" in caplog.text


def test_a_command_that_waited_for_readiness_is_told_nothing_after_it(tmp_path, caplog):
    """`start --detach` is gone then: its node ended with a warning about a service manager that never was."""

    async def run() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as command:
            command.bind(str(tmp_path / "notify"))
            command.settimeout(HANGS_S)
            environ = asked(command, WATCHDOG_USEC="40000")  # of the manager of the command, not of the node
            with notifying(notice_from(environ, 7, until_ready=True)) as ready:
                ready()
                assert command.recv(100).startswith(b"READY=1"), "and no sign of life"
                command.setblocking(False)
                (tmp_path / "notify").unlink()
            with pytest.raises(BlockingIOError):
                command.recv(100)

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert not caplog.records


@pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="NO ABSTRACT SOCKETS HERE: Linux only")
def test_an_abstract_address_begins_with_an_at_sign():
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
        link.bind("")  # the kernel picks an abstract name
        link.settimeout(HANGS_S)
        Notice("@" + link.getsockname()[1:].decode(), None).ready()
        assert link.recv(100).startswith(b"READY=1")


def test_a_manager_that_does_not_read_holds_up_nobody(manager):
    notice = Notice(address(manager), None)
    for _ in range(5000):
        notice.ready()
