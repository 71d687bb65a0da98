"""Serves the node's web page, its data, its metrics and the orders of the page over HTTP.

The server is off unless the user names an address. Requests cost the node at most SHARE of its loop's time and
the memory of MAX_CONNECTIONS replies, and a bad one ends nothing but its own connection.

`ListenAddress` is the address that the user gives, `IP:PORT` or `localhost:PORT`.
"""

import asyncio
import contextlib
import ipaddress
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import NamedTuple

from atoll.node.daemon.web import http_messages
from atoll.node.daemon.web.http_messages import HttpRefusal, HttpReply, HttpRequest
from atoll.protocols.errors import AtollError, ConfigError

log = logging.getLogger(__name__)
MAX_CONNECTIONS = 8
ACCEPT_S = 0.01
"""Pause between two connections, so that a flood of them costs little."""
REQUEST_S = 5.0
"""Deadline from the connection to the whole request, its body included."""
WRITE_S = 10.0
RETRY_S = 10.0
"""Pause between two attempts to listen on an address that is in use, or to accept without file descriptors."""
LOOPBACK = "127.0.0.1"
SHARE = 0.05
"""Largest share of the loop's time that replies may take: after each one the next waits."""
PAUSE_MAX_S = 1.0
Answer = Callable[[HttpRequest], Awaitable[HttpReply]]


class ListenAddress(NamedTuple):
    """An IP address and a TCP port; port 0 is any free one."""

    ip: str
    port: int

    def __str__(self) -> str:
        return f"[{self.ip}]:{self.port}" if ":" in self.ip else f"{self.ip}:{self.port}"


def is_loopback(text: str) -> bool:
    """Whether only this machine reaches the address of this text. Raises as `parse_listen_address`."""
    address = parse_listen_address(text)
    return address is None or ipaddress.ip_address(address.ip).is_loopback


def has_loopback(text: str) -> bool:
    """Whether a browser on this machine can reach the address of this text by loopback."""
    address = parse_listen_address(text)
    return is_loopback(text) or (address is not None and ipaddress.ip_address(address.ip).is_unspecified)


def parse_listen_address(text: str) -> ListenAddress | None:
    """Parse `IP:PORT`, or `localhost:PORT`: 127.0.0.1. None for an empty text.

    Raises ConfigError, also for other names: they are not looked up.
    """
    if not text:
        return None
    host, _, port = text.rpartition(":")
    host = LOOPBACK if host.lower() == "localhost" else host
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        ip = ipaddress.ip_address(bare)
    except ValueError:
        ip = None
    if ip is None or (ip.version == 6) != (bare != host) or not (port.isascii() and port.isdigit()):
        raise ConfigError(f"web: {text!r} is not IP:PORT", hint="for example 127.0.0.1:4780, or localhost:0")
    if len(port) > 5 or int(port) > 65535:
        raise ConfigError(f"web: port {port} is outside 0 … 65535")
    return ListenAddress(str(ip), int(port))


class WebServer:
    """Owns the listening socket. `serve` runs it."""

    def __init__(self, address: ListenAddress | None, answer: Answer, now: Callable[[], float]) -> None:
        """Without an address nothing is served. `now`: a clock in seconds, which measures what replies cost."""
        self._address = address
        self._answer = answer
        self._now = now
        self.url = ""
        """URL of the page; empty while it is not served."""
        self.trouble = ""
        """Why the page is not served although it should be; else empty."""
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)
        self._turn = asyncio.Lock()

    async def serve(self) -> None:
        """Run until cancelled. An address that is in use is tried again; it does not end the node."""
        if self._address is None:
            return
        listener = await self._listen(self._address)
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    await self._slots.acquire()  # later connections wait in the kernel's backlog
                    group.create_task(self._session(await _accept(listener)), name="web")
                    await asyncio.sleep(ACCEPT_S)
        finally:
            self.url = ""
            listener.close()

    async def _listen(self, address: ListenAddress) -> socket.socket:
        family = socket.AF_INET6 if ":" in address.ip else socket.AF_INET
        while True:
            try:
                listener = socket.create_server(address, family=family, backlog=MAX_CONNECTIONS)
                break
            except OSError as error:
                why = os.strerror(error.errno) if error.errno else str(error)
                if not self.trouble:
                    log.warning("no web page at %s: %s; trying again", address, why)
                self.trouble = f"cannot listen on {address}: {why}; trying again"
            await asyncio.sleep(RETRY_S)
        listener.setblocking(False)
        self.url = f"http://{ListenAddress(address.ip, listener.getsockname()[1])}/"
        self.trouble = ""
        is_local = ipaddress.ip_address(address.ip).is_loopback
        log.info("web page at %s%s", self.url, "" if is_local else ", for everybody who reaches this machine")
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
        """Read one request and send its reply; close without one if no whole request arrives."""
        try:
            is_near = is_from_loopback(link)
            reader, writer = await asyncio.open_connection(sock=link, limit=http_messages.HEAD_MAX_BYTES)
        except BaseException:
            link.close()
            raise
        try:
            if request := await _read_request(reader, is_near=is_near):
                await _send(writer, await self._reply(request))
                writer.close()
        finally:
            if not writer.is_closing():
                writer.transport.abort()

    async def _reply(self, request: HttpRequest | HttpRefusal) -> HttpReply:
        """The reply to a request. One is made at a time, with a pause after it in proportion to its cost."""
        async with self._turn:
            began = self._now()
            try:
                return request.reply() if isinstance(request, HttpRefusal) else await self._answer(request)
            except AtollError as error:
                return HttpRefusal(503, error.line()).reply()
            finally:
                await asyncio.sleep(min(PAUSE_MAX_S, (self._now() - began) / SHARE))


def is_from_loopback(link: socket.socket) -> bool:
    """Whether the other end of a connection is a program on this machine. Raises OSError when it is gone."""
    return ipaddress.ip_address(link.getpeername()[0]).is_loopback


async def _accept(listener: socket.socket) -> socket.socket:
    """The next connection; tried again every RETRY_S while this process has no free file descriptor."""
    while True:
        try:
            return (await asyncio.get_running_loop().sock_accept(listener))[0]
        except OSError as error:
            log.warning("no connection to the web page: %s", error.strerror)
            await asyncio.sleep(RETRY_S)


async def _read_request(reader: asyncio.StreamReader, *, is_near: bool) -> HttpRequest | HttpRefusal | None:
    """The next request with its body; None if it is too long, too slow or cut off.

    A refusal comes from the head alone: what is not wanted is not read.
    """
    with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        async with asyncio.timeout(REQUEST_S):
            request = http_messages.parse(await reader.readuntil(http_messages.END))
            if isinstance(request, HttpRefusal):
                return request
            body = await reader.readexactly(request.body_bytes)
            return replace(request, body=body, is_from_loopback=is_near)
    return None


async def _send(writer: asyncio.StreamWriter, reply: HttpReply) -> None:
    """Write a reply and wait until this side's buffer is empty. Raises TimeoutError after WRITE_S."""
    if writer.is_closing():  # who asked hung up; a closed transport of uvloop takes no limits
        return
    writer.transport.set_write_buffer_limits(0)
    async with asyncio.timeout(WRITE_S):
        writer.write(http_messages.encode(reply))
        await writer.drain()
