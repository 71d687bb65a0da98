"""The p2pd child process: its flags, its start and its end.

p2pd dies with us in two ways: it exits when our persistent control connection closes (every platform), and the
kernel sends SIGKILL when our process is gone (Linux), which also covers a p2pd that hangs.

Before the start the ports of its listen addresses are checked; after it, the port that 0 became is read.
"""

import asyncio
import contextlib
import errno
import os
import re
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from multiaddr import Multiaddr

from atoll.p2p.host.maddrs import endpoint_of
from atoll.p2p.system.child_processes import die_with_parent
from atoll.p2p.transports.p2pd.private_folder import no_folder
from atoll.p2p.transports.p2pd.schema import binary
from atoll.protocols.errors import LocalFault
from atoll.protocols.identity import Identity

_START_S: Final = 30.0
_STOP_S: Final = 3.0
_TAIL_BYTES: Final = 4096
_ENVIRONMENT: Final = {"GOGC": "50", "LIBP2P_TCP_REUSEPORT": "false"}
"""Of p2pd, unless the user's says otherwise. Go collects once garbage is half of what lives, not as much: 15 MB
less, for 9 % of p2pd's little CPU. Dials by TCP leave from ports of their own: from the listening port, those of
two peers that lost each other cross when a cut heals, become one connection, and fail for 6 to 11 s."""
_MAPPED: Final = re.compile(rb"\tnat\t\S+\t(?:NAT Mapping: (\d+) --> \d+ \((tcp|udp)\)|failed to establish)")
"""What go-libp2p logs of each mapping that it makes or renews; its control protocol has no question for it."""


@dataclass(frozen=True, slots=True)
class P2pdOptions:
    """Options of p2pd. Punching, relaying and announced addresses are ours (`p2p/nat`), not p2pd's."""

    listen: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    """Port 0 is chosen once and kept over restarts."""
    port_map: bool = False
    """Ask the router for a port (UPnP, NAT-PMP)."""
    connections_low: int = 96
    connections_high: int = 192
    grace_s: int = 30
    """Age below which p2pd closes no connection. Of older ones it looks every 10 s whether there are too many."""
    idle_exit_s: int = 20
    """p2pd exits when we never attach within this time."""

    def flags(self, listen: Sequence[str], folder: Path) -> tuple[str, ...]:
        """Command line for p2pd; no `-b`: a bootstrap peer that is down would kill p2pd, so we dial."""
        return (
            f"-listen=/unix{folder / CONTROL_SOCKET}",
            f"-id={folder / _KEY_FILE}",
            f"-hostAddrs={','.join(listen)}",
            f"-idleTimeout={self.idle_exit_s}s",
            "-connManager=1",
            f"-connLo={self.connections_low}",
            f"-connHi={self.connections_high}",
            f"-connGrace={self.grace_s}s",
            f"-f={folder / _NO_HOP_FILE}",
            "-relay=0",
            "-relayDiscovery=0",
            "-relayService=0",
            "-autoRelay=0",
            "-autonat=0",
            f"-natPortMap={self.port_map:d}",
        )


CONTROL_SOCKET: Final = "control"
STREAMS_SOCKET: Final = "streams"
_KEY_FILE: Final = "key"
_NO_HOP_FILE: Final = "no_hop.json"
_NO_HOP: Final = '{"Relay": {"Enabled": false}}'
"""p2pd relays for anybody, whatever its flags say, unless a file of its settings forbids it too. At each start its
relay would read a table of the Internet's networks, for 0.3 s of CPU."""
CLOCK_FELL_S: Final = 1800.0
"""p2pd's certificate allows for clocks that differ by an hour; peers' clocks may be behind, too."""


def clock_s() -> float:
    """The wall clock over the one that goes on while the machine sleeps, so that only a correction changes it."""
    return time.time() - time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class P2pdProcess(asyncio.SubprocessProtocol):
    """One running p2pd. Made by `start`."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._up: asyncio.Future[None] = loop.create_future()
        self._exited: asyncio.Future[None] = loop.create_future()
        self._transport: asyncio.SubprocessTransport | None = None
        self.tail = b""
        self.port_map: dict[str, int] = {}
        """Ports of the router that lead to us, by transport."""
        self._line = b""
        self._clock_s = clock_s()

    @property
    def datedness(self) -> str:
        """Why peers refuse its certificate of QUIC: it begins an hour before p2pd's start, by the clock of then.

        Empty while they take it. p2pd makes no other one, and without QUIC no hole is punched.
        """
        fell_s = self._clock_s - clock_s()
        return f"started {fell_s / 3600:.1f} h ahead of the clock of now" if fell_s > CLOCK_FELL_S else ""

    @classmethod
    async def start(
        cls, options: P2pdOptions, listen: Sequence[str], identity: Identity, folder: Path
    ) -> "P2pdProcess":
        """Start p2pd and wait until its control socket answers. Raises LocalFault with p2pd's last words."""
        process = cls()
        try:
            _prepare(folder, identity)
            await process._spawn(options.flags(listen, folder), "error,nat=debug" if options.port_map else "error")
            async with asyncio.timeout(_START_S):
                await asyncio.wait((process._up, process._exited), return_when=asyncio.FIRST_COMPLETED)
            if process._exited.done():
                raise LocalFault(f"p2pd did not start: {process.last_words()}")
        except TimeoutError as error:
            await process.stop()
            raise LocalFault(f"p2pd was not ready within {_START_S:.0f} s: {process.last_words()}") from error
        except BaseException:
            await process.stop()
            raise
        finally:
            (folder / _KEY_FILE).unlink(missing_ok=True)
        return process

    @property
    def pid(self) -> int:
        """Process id of p2pd."""
        assert self._transport is not None
        return self._transport.get_pid()

    async def exited(self) -> None:
        """Return when p2pd is gone, for whatever reason."""
        await asyncio.shield(self._exited)

    async def stop(self) -> None:
        """End p2pd with SIGTERM, then with SIGKILL. Returns when it is reaped."""
        if self._transport is None:
            return
        try:
            self._signal(signal.SIGTERM)
            await asyncio.wait((self._exited,), timeout=_STOP_S)
        finally:
            self._signal(signal.SIGKILL)
            await asyncio.shield(self._exited)
            self._transport.close()

    def last_words(self) -> str:
        """Return the last output of p2pd on one line."""
        words = self.tail.decode(errors="replace").splitlines()
        lines = [line for line in words if line.strip() and "\tDEBUG\t" not in line]
        return " / ".join(lines[-3:])[-400:] or "no output"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: the process runs."""
        self._transport = cast(asyncio.SubprocessTransport, transport)  # uvloop's does not inherit from it

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """asyncio: output; only its end is kept, and what it says of the router's ports."""
        self.tail = (self.tail + data)[-_TAIL_BYTES:]
        *lines, rest = (self._line + data).split(b"\n")
        self._line = rest[-_TAIL_BYTES:]
        for found in filter(None, map(_MAPPED.search, lines)):
            if found[2]:
                self.port_map[found[2].decode()] = int(found[1])
            else:
                self.port_map.clear()
        if not self._up.done() and b"Peer ID:" in self.tail:
            self._up.set_result(None)

    def process_exited(self) -> None:
        """Called by asyncio when the process was reaped."""
        if not self._exited.done():
            self._exited.set_result(None)

    async def _spawn(self, flags: Sequence[str], log_level: str) -> None:
        loop = asyncio.get_running_loop()
        environment = {**_ENVIRONMENT, **os.environ, "GOLOG_LOG_LEVEL": log_level}
        try:
            await loop.subprocess_exec(
                lambda: self,
                str(binary()),
                *flags,
                stdin=None,
                stderr=asyncio.subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C in the terminal is for the node, which ends p2pd in order
                preexec_fn=die_with_parent(os.getpid()),
            )
        except OSError as error:
            raise LocalFault(f"cannot run p2pd: {error}") from error

    def _signal(self, number: int) -> None:
        if self._transport is not None and not self._exited.done():
            with contextlib.suppress(ProcessLookupError):
                self._transport.send_signal(number)


def _prepare(folder: Path, identity: Identity) -> None:
    """What p2pd reads at its start. Raises LocalFault."""
    try:
        for name in (CONTROL_SOCKET, _KEY_FILE):
            (folder / name).unlink(missing_ok=True)
        descriptor = os.open(folder / _KEY_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(identity.libp2p_private_key())
        (folder / _NO_HOP_FILE).write_text(_NO_HOP)
    except OSError as error:
        raise no_folder(error) from error


def with_port(maddr: str, actual: tuple[str, ...]) -> str:
    """Return `maddr` with port 0 replaced by the port that p2pd listens on."""
    wanted = endpoint_of(maddr)
    if wanted is None or wanted.port:
        return maddr
    for found in filter(None, map(endpoint_of, actual)):
        if (found.is_ip6, found.transport) == (wanted.is_ip6, wanted.transport):
            return maddr.replace(f"/{wanted.transport}/0", f"/{wanted.transport}/{found.port}")
    return maddr


def require_free(maddrs: tuple[str, ...]) -> None:
    """Raise LocalFault when another program listens at one of `maddrs`.

    Where the user's environment lets go-libp2p set SO_REUSEPORT, a second p2pd of the same user would start and
    steal connections.
    """
    for maddr in maddrs:
        try:
            Multiaddr(maddr)
        except Exception as error:  # multiaddr raises a dozen kinds
            raise LocalFault(
                f"not a listen address: {maddr}", hint="for instance /ip4/0.0.0.0/tcp/4001"
            ) from error
        place = endpoint_of(maddr)
        if place is None or not place.port:
            continue
        family = socket.AF_INET6 if place.is_ip6 else socket.AF_INET
        kind = socket.SOCK_STREAM if place.transport == "tcp" else socket.SOCK_DGRAM
        with socket.socket(family, kind) as probe:
            if kind == socket.SOCK_STREAM:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((place.ip, place.port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise LocalFault(
                        f"port {place.port} is in use", hint="choose another port or stop the other program"
                    ) from error
                raise LocalFault(f"cannot listen on {maddr}: {error}") from error
