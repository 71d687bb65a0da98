"""Networks of their own for children (Linux): each lives as long as its first process; nothing is left behind.

As root, plain network namespaces; else one inside a user namespace where the kernel lets everybody make them.
"""

import asyncio
import contextlib
import os
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from atoll.p2p.system.child_processes import die_with_parent
from atoll.protocols.errors import LocalFault

_PATIENCE_S = 10.0
_BURST_BYTES = 32 * 1024
_QUEUE_MS = 100
"""A home router's buffer."""


async def can_isolate() -> bool:
    """Whether children can have a network of their own here."""
    return _has("unshare", "nsenter", "ip") and await _ran(*new_space(), "true") is None


def can_shape() -> bool:
    """Whether it is worth trying to make networks with links of a given rate."""
    return _is_root() and _has("unshare", "nsenter", "ip", "tc")


def new_space() -> tuple[str, ...]:
    """Words before a command that give it a network with loopback alone."""
    as_root = () if _is_root() else ("-r",)
    return ("unshare", "-n", *as_root, "--", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")


def space_of(process_id: int) -> tuple[str, ...]:
    """Words before a command that put it into the network of a running process."""
    user = () if _is_root() else ("-U", "--preserve-credentials")
    return ("nsenter", "-t", str(process_id), *user, "-n", "--")


def _is_root() -> bool:
    return os.geteuid() == 0


def _has(*programs: str) -> bool:
    return sys.platform == "linux" and all(map(shutil.which, programs))


@contextlib.asynccontextmanager
async def empty_space() -> AsyncIterator[int]:
    """A network of its own, held by a process that does nothing; the process id. Raises LocalFault."""
    # `echo` tells that the network is there; `cat` holds it until its input ends.
    process = await asyncio.create_subprocess_exec(
        *new_space(),
        *("sh", "-c", "echo && exec cat"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        preexec_fn=die_with_parent(os.getpid()),
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if not await process.stdout.readline():
            raise LocalFault("a network namespace could not be made")
        yield process.pid
    finally:
        process.stdin.close()
        await process.wait()


@dataclass(frozen=True, slots=True)
class Plug:
    """A machine on the switch: its network, its address, and the rates of its link in bit/s."""

    pid: int
    ip: str
    up_bit_s: int | None = None
    down_bit_s: int | None = None


async def plug_in(switch: int, plugs: Sequence[Plug]) -> None:
    """Make the network of process `switch` a switch that all plugs hang on. Raises LocalFault."""
    await command(*space_of(switch), "ip", "link", "add", "br0", "type", "bridge")
    await command(*space_of(switch), "ip", "link", "set", "br0", "up")
    for number, plug in enumerate(plugs):
        inside, port = space_of(plug.pid), f"port{number}"
        veth = ("type", "veth", "peer", "name", port, "netns", str(switch))
        await command(*inside, "ip", "link", "add", "name", "eth0", *veth)
        await command(*inside, "ip", "addr", "add", f"{plug.ip}/24", "dev", "eth0")
        await command(*inside, "ip", "link", "set", "eth0", "up")
        await command(*space_of(switch), "ip", "link", "set", port, "master", "br0", "up")
        await _limit(inside, "eth0", plug.up_bit_s)
        await _limit(space_of(switch), port, plug.down_bit_s)


async def _limit(inside: Sequence[str], device: str, bit_s: int | None) -> None:
    if bit_s is not None:
        bucket = ("rate", f"{bit_s}bit", "burst", str(_BURST_BYTES), "latency", f"{_QUEUE_MS}ms")
        await command(*inside, "tc", "qdisc", "replace", "dev", device, "root", "tbf", *bucket)


async def command(*words: str) -> None:
    """Run a program of the system. Raises LocalFault with its complaint."""
    complaint = await _ran(*words)
    if complaint is not None:
        raise LocalFault(f"{' '.join(words)}: {complaint}")


async def _ran(*words: str) -> str | None:
    """None when it went well, else its complaint."""
    try:
        process = await asyncio.create_subprocess_exec(
            *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
    except OSError as error:
        return str(error)
    try:
        async with asyncio.timeout(_PATIENCE_S):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return "no end"
    return None if process.returncode == 0 else output.decode(errors="replace").strip() or "failed"
