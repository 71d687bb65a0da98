"""Serves the node's web page, its data and its metrics over HTTP, to read only.

Off unless the user names an address. Whatever comes in here costs the node at most SHARE of its loop's time and
MAX_CONNECTIONS answers of memory, and ends nothing but its own connection.
"""

import asyncio
import contextlib
import ipaddress
import logging
import os
import socket
from collections.abc import Awaitable, Callable

from atoll.node.daemon.web.place import ListenAddress
from atoll.node.daemon.web.reply import HttpReply, encoded, refused
from atoll.node.daemon.web.request import END, HEAD_MAX_BYTES, HttpRefusal, HttpRequest, parse
from atoll.protocols.errors import AtollError

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 8
ACCEPT_S = 0.01
"""From one connection to the next, so that a flood of them costs little."""
REQUEST_S = 5.0
"""From the connection to the whole request."""
WRITE_S = 10.0
RETRY_S = 10.0
"""Between two attempts to listen on an address that is taken."""
SHARE = 0.05
"""Most of the loop's time that answers may take: after each one the next waits."""
PAUSE_MAX_S = 1.0

Answer = Callable[[HttpRequest], Awaitable[HttpReply]]


class WebServer:
    """Owns the listening socket. `serve` runs it."""

    def __init__(self, place: ListenAddress | None, answer: Answer, now: Callable[[], float]) -> None:
        """Without a place it serves nothing. `now`: seconds, to see what answers cost."""
        self._place, self._answer, self._now = place, answer, now
        self.url = ""
        """Where the page is; empty while it is nowhere."""
        self.trouble = ""
        """Why it is nowhere although it should be."""
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)
        self._turn = asyncio.Lock()

    async def serve(self) -> None:
        """Run until cancelled. An address that is taken is tried again and again; it is no reason to end."""
        if self._place is None:
            return
        listener = await self._listening(self._place)
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    await self._slots.acquire()  # who comes when all are taken waits in the kernel
                    group.create_task(self._session(await _next(listener)), name="web")
                    await asyncio.sleep(ACCEPT_S)
        finally:
            self.url = ""
            listener.close()

    async def _listening(self, place: ListenAddress) -> socket.socket:
        family = socket.AF_INET6 if ":" in place.ip else socket.AF_INET
        while True:
            try:
                listener = socket.create_server(place, family=family, backlog=MAX_CONNECTIONS)
                break
            except OSError as error:
                why = os.strerror(error.errno) if error.errno else str(error)
                if not self.trouble:
                    log.warning("no web page at %s: %s; trying again", place, why)
                self.trouble = f"cannot listen on {place}: {why}; trying again"
            await asyncio.sleep(RETRY_S)
        listener.setblocking(False)
        self.url, self.trouble = f"http://{ListenAddress(place.ip, listener.getsockname()[1])}/", ""
        open_to = "" if ipaddress.ip_address(place.ip).is_loopback else ", for everybody who reaches this machine"
        log.info("web page at %s%s", self.url, open_to)
        return listener

    async def _session(self, link: socket.socket) -> None:
        try:
            await self._exchange(link)
        except (OSError, TimeoutError):
            return
        except Exception:  # a bug in a report must not end the training
            log.exception("web request failed")
        finally:
            self._slots.release()

    async def _exchange(self, link: socket.socket) -> None:
        """One request and its answer; nothing for what is no request."""
        try:
            reader, writer = await asyncio.open_connection(sock=link, limit=HEAD_MAX_BYTES)
        except BaseException:
            link.close()
            raise
        try:
            if head := await _head(reader):
                await _send(writer, await self._reply(parse(head)))
                writer.close()
        finally:
            if not writer.is_closing():
                writer.transport.abort()

    async def _reply(self, asked: HttpRequest | HttpRefusal) -> HttpReply:
        """One at a time, and after each a pause in proportion to what it took."""
        async with self._turn:
            began = self._now()
            try:
                return (
                    refused(asked.status, asked.text)
                    if isinstance(asked, HttpRefusal)
                    else await self._answer(asked)
                )
            except AtollError as error:
                return refused(503, error.line())
            finally:
                await asyncio.sleep(min(PAUSE_MAX_S, (self._now() - began) / SHARE))


async def _next(listener: socket.socket) -> socket.socket:
    """The next connection. When this process is out of descriptors it waits for better times."""
    while True:
        try:
            return (await asyncio.get_running_loop().sock_accept(listener))[0]
        except OSError as error:
            log.warning("no connection to the web page: %s", error.strerror)
            await asyncio.sleep(RETRY_S)


async def _head(reader: asyncio.StreamReader) -> bytes:
    """The request up to its empty line; empty when it is too long, too slow or cut off."""
    with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        async with asyncio.timeout(REQUEST_S):
            return await reader.readuntil(END)
    return b""


async def _send(writer: asyncio.StreamWriter, reply: HttpReply) -> None:
    """Write, and wait until the other side's kernel has it."""
    writer.transport.set_write_buffer_limits(0)
    async with asyncio.timeout(WRITE_S):
        writer.write(encoded(reply))
        await writer.drain()
