"""Serves the control protocol on a Unix socket in the home, only to the user who runs the node (mode 0600).

The server knows the protocol, the Operator knows the node. Requests of one connection are served one after the
other. A connection that does not read its answers is dropped.
"""

import asyncio
import logging
import os
import socket
import struct
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path

from atoll.node.daemon.telemetry.logfile import LogTail
from atoll.node.ipc.control_socket import ControlSocket
from atoll.p2p.host.framing import check_open
from atoll.protocols.errors import AtollError, LocalFault
from atoll.protocols.local import control_messages
from atoll.protocols.local.control_lines import REQUEST_MAX_BYTES, decode_ask, encode_answer, refusal
from atoll.protocols.local.operator import Operator, answer_ask

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 32
_FULL = LocalFault(
    f"{MAX_CONNECTIONS} programs are connected to this node already",
    hint="end some: each `atoll top` and `atoll logs -f` is one",
)
REQUEST_S = 600.0
"""A connection without a request for so long is closed."""
WRITE_S = 10.0
FOLLOW_POLL_S = 0.25
HEARTBEAT_S = 5.0
LINES_PER_ANSWER = 500
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: Linux' struct ucred


class ControlServer:
    """Owns the socket. `serve` runs it."""

    def __init__(self, socket_path: Path, log_path: Path, operator: Operator) -> None:
        self.socket = ControlSocket(socket_path)
        self._log_path = log_path
        self._operator = operator
        self._open = 0
        self._group: asyncio.TaskGroup | None = None

    async def serve(self, ready: Callable[[], None] = lambda: None) -> None:
        """Run until cancelled; `ready` is called once when the socket answers. Raises LocalFault.

        The caller holds the home's lock, so a socket file that is there already belongs to a dead node.
        """
        listener = self.socket.bind(MAX_CONNECTIONS)
        try:
            async with asyncio.TaskGroup() as self._group:
                server = await asyncio.start_unix_server(self._accept, sock=listener, limit=REQUEST_MAX_BYTES)
                try:
                    ready()
                    await asyncio.Event().wait()
                finally:
                    self._group = None  # a group that ends takes no task, and a connection may still arrive
                    self.socket.put_aside()  # Python 3.13 would remove it
                    server.close()
        finally:
            self.socket.put_aside()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._group is None or not _same_user(writer):
            writer.transport.abort()
            return
        if self._open >= MAX_CONNECTIONS:
            if not writer.is_closing():
                writer.write(encode_answer(refusal(_FULL)))  # a silent end would look as if no node ran
            writer.close()
            return
        self._open += 1
        self._group.create_task(self._session(reader, writer), name="control")

    async def _session(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await _next_line(reader):
                async with aclosing(self._answers(line)) as answers:
                    async for answer in answers:
                        await _send(writer, answer)
                        if reader.at_eof():
                            return
            writer.close()
        except (OSError, TimeoutError):
            return
        finally:
            self._open -= 1
            if not writer.is_closing():
                writer.transport.abort()

    async def _answers(self, line: bytes) -> AsyncGenerator[control_messages.Answer, None]:
        try:
            ask = decode_ask(line)
            match ask:
                case control_messages.Watch():
                    while True:
                        yield self._operator.status()
                        await asyncio.sleep(ask.interval_s)
                case control_messages.GetLogs():
                    async for lines in _log_lines(LogTail(self._log_path), ask):
                        yield lines
                case _:
                    yield await answer_ask(self._operator, ask)
        except AtollError as error:
            yield refusal(error)
        except Exception as error:  # a bug in a report must not end the training
            log.exception("control request failed")
            yield refusal(LocalFault(f"internal error: {error!r}", hint="see `atoll logs`"))


async def _send(writer: asyncio.StreamWriter, answer: control_messages.Answer) -> None:
    async with asyncio.timeout(WRITE_S):
        check_open(writer)
        writer.write(encode_answer(answer))
        await writer.drain()


async def _next_line(reader: asyncio.StreamReader) -> bytes:
    """The next request; empty when the operator hung up, sent too much, or asked nothing for REQUEST_S."""
    try:
        async with asyncio.timeout(REQUEST_S):
            return await reader.readline()
    except ValueError:  # a line above the limit
        return b""


async def _log_lines(
    tail: LogTail, ask: control_messages.GetLogs
) -> AsyncGenerator[control_messages.LogLines, None]:
    lines = tail.last(ask.tail)
    for start in range(0, max(1, len(lines)), LINES_PER_ANSWER):
        yield control_messages.LogLines(lines[start : start + LINES_PER_ANSWER])
    if not ask.follow:
        yield control_messages.LogLines(())
    quiet_s = 0.0
    while ask.follow:
        await asyncio.sleep(FOLLOW_POLL_S)
        fresh = tail.fresh()
        quiet_s = 0.0 if fresh else quiet_s + FOLLOW_POLL_S
        if quiet_s >= HEARTBEAT_S:  # the only way to notice that the reader has gone
            quiet_s = 0.0
            yield control_messages.LogLines(())
        for start in range(0, len(fresh), LINES_PER_ANSWER):
            yield control_messages.LogLines(fresh[start : start + LINES_PER_ANSWER])


def _same_user(writer: asyncio.StreamWriter) -> bool:
    """The peer's uid is ours (or root's). Systems without SO_PEERCRED rely on the file's mode."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return True
    if writer.is_closing():  # it was lost at once, and has no socket any more
        return False
    raw = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size)
    _pid, uid, _gid = _CREDENTIALS.unpack(raw)
    return uid in (0, os.geteuid())
