"""Reads what this machine says about itself: its power supply, its users, its GPUs. Linux only.

Power is read from `/sys/class/power_supply`. A user is somebody who types in a terminal, whose device then has a
newer time of access, or who sits at a desktop, whose session tells logind when it is idle. Temperatures are what
`nvidia-smi` prints.
"""

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import TypeVar

from atoll.node.config.guest import GuestLimits
from atoll.protocols.errors import ConfigError, LocalFault

T = TypeVar("T")
MAX_BYTES = 1 << 16
"""Longest file or output that is read."""
MAX_SESSIONS = 64
DESKTOPS = ("x11", "wayland", "mir")
"""Types of logind's sessions with a screen."""
SESSION_KEYS = ("Class", "Type", "State", "IdleHint", "IdleSinceHint")
_GPU_QUERY = ("--query-gpu=temperature.gpu", "--format=csv,noheader,nounits")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFiles:
    """Where the sensors look; tests have folders of their own."""

    power: Path = Path("/sys/class/power_supply")
    devices: Path = Path("/dev")
    displays: Path = Path("/tmp/.X11-unix")
    loginctl: str = "loginctl"
    nvidia_smi: str = "nvidia-smi"


def on_battery(power: Path) -> bool:
    """Return whether the machine discharges its battery, and no charger is connected. Raises LocalFault.

    A machine without a battery runs on mains power. Batteries of mice and keyboards do not count.
    """
    try:
        supplies = sorted(power.iterdir())
    except OSError as error:
        raise LocalFault(f"cannot read {power}: {error.strerror}") from error
    discharging = False
    for supply in supplies:
        kind = _word(supply / "type")
        if kind in ("Mains", "USB") and _word(supply / "online") == "1":
            return False
        if kind == "Battery" and _word(supply / "scope") != "Device":
            discharging |= _word(supply / "status") == "Discharging"
    return discharging


def typed_at(devices: Path) -> list[float]:
    """Return when somebody last typed in each terminal, in seconds since 1970.

    The kernel sets a terminal's time of access when a program reads input from it, at most every 8 s.
    """
    found = []
    for path in (*devices.glob("pts/[0-9]*"), *devices.glob("tty[0-9]*")):
        with contextlib.suppress(OSError):  # a terminal that was closed meanwhile
            found.append(path.stat().st_atime)
    return found


def desktop_used_at(sessions: str, now_s: float) -> list[float]:
    """Return when somebody last used each desktop, in seconds since 1970.

    `sessions`: what `loginctl show-session` printed of all sessions, apart by empty lines. A session that is not
    idle is used now.
    """
    found = []
    for block in sessions.split("\n\n"):
        known = dict(line.partition("=")[::2] for line in block.splitlines())
        if known.get("Class") != "user" or known.get("Type") not in DESKTOPS or known.get("State") == "closing":
            continue
        since = known.get("IdleSinceHint", "")
        is_idle = known.get("IdleHint") == "yes" and since.isdigit()
        found.append(int(since) / 1e6 if is_idle else now_s)
    return found


def hottest(printed: str) -> int:
    """Return the highest temperature, in °C, of those that `nvidia-smi` printed, one a line. Raises LocalFault."""
    found = [int(line) for line in printed.split() if line.isdigit()]
    if not found:
        raise LocalFault(f"nvidia-smi knows no temperature: {' '.join(printed.split())[:80]!r}")
    return max(found)


def check_sensors(limits: GuestLimits, files: MachineFiles) -> None:
    """Raise ConfigError for a limit that cannot be measured on this machine at all."""
    for key, why in _missing(limits, files):
        raise ConfigError(f"guest.{key} cannot be measured here: {why}", hint=f"atoll config unset guest.{key}")


def _missing(limits: GuestLimits, files: MachineFiles) -> Iterator[tuple[str, str]]:
    if limits.mains_only and not files.power.is_dir():
        yield "battery", f"there is no {files.power}"
    if limits.idle_s is not None:
        if not (files.devices / "pts").is_dir():
            yield "idle_after", f"there is no {files.devices / 'pts'}"
        elif shutil.which(files.loginctl) is None and any(files.displays.glob("X*")):
            yield "idle_after", "a desktop runs, and there is no loginctl that knows when it is idle"
    if limits.gpu_most_c is not None and shutil.which(files.nvidia_smi) is None:
        yield "gpu_most_c", "there is no nvidia-smi"


class MachineSensors:
    """The sensors of this machine. Every method raises LocalFault for what cannot be read; the caller sets the
    deadline. Nothing here blocks the event loop."""

    def __init__(self, files: MachineFiles, wall: Callable[[], float] = time.time) -> None:
        """`wall`: seconds since 1970."""
        self._files = files
        self._wall = wall
        self._ahead_s, self._seen_s = 0.0, 0.0
        """The newest use in the future, and when it was seen first: the clock was put back."""
        self._hanging: set[str] = set()
        self._programs: dict[str, asyncio.subprocess.Process] = {}

    async def on_battery(self) -> bool:
        """Return whether the machine runs on its battery."""
        return await self._in_thread("the power supply", lambda: on_battery(self._files.power))

    async def idle_s(self) -> float:
        """Return the seconds since somebody used this machine; since 1970 if nobody ever did."""
        used = await self._in_thread("the terminals", lambda: typed_at(self._files.devices))
        if shutil.which(self._files.loginctl) is not None:
            used += desktop_used_at(await self._sessions(), self._wall())
        now_s = self._wall()
        ahead_s = max((at for at in used if at > now_s), default=0.0)
        if ahead_s != self._ahead_s:
            self._ahead_s, self._seen_s = ahead_s, now_s
        known = [at for at in used if at <= now_s] + [self._seen_s] * (ahead_s > 0.0)
        return max(0.0, now_s - max(known, default=0.0))

    async def gpu_c(self) -> int:
        """Return the temperature of the hottest GPU, in °C."""
        return hottest(await self._printed_by(self._files.nvidia_smi, *_GPU_QUERY))

    async def _sessions(self) -> str:
        try:
            listed = await self._printed_by(self._files.loginctl, "list-sessions", "--no-legend")
        except LocalFault:
            if any(self._files.displays.glob("X*")):
                raise
            return ""  # a container has the program and no logind; without a desktop the terminals say it all
        names = [line.split()[0] for line in listed.splitlines() if line.strip()][:MAX_SESSIONS]
        if not names:
            return ""
        keys = [f"--property={key}" for key in SESSION_KEYS]
        return await self._printed_by(self._files.loginctl, "show-session", *keys, "--", *names)

    async def _in_thread(self, name: str, read: Callable[[], T]) -> T:
        """Read files in a thread of their own, as a driver of the kernel may hang for ever.

        A thread of the executor would then hold up the end of the process.
        """
        if name in self._hanging:
            raise LocalFault(f"{name} did not answer the read before")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def deliver(found: T | None, fault: LocalFault | None) -> None:
            self._hanging.discard(name)
            if answer.done():
                return
            if fault is None:
                answer.set_result(found)  # type: ignore[arg-type]
            else:
                answer.set_exception(fault)

        def work() -> None:
            found, fault = None, None
            try:
                found = read()
            except LocalFault as error:
                fault = error
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(deliver, found, fault)

        self._hanging.add(name)
        Thread(target=work, name=name, daemon=True).start()
        return await answer

    async def _printed_by(self, *command: str) -> str:
        """Return what a program prints; it is ended when the caller waits no longer. Raises LocalFault."""
        before = self._programs.get(command[0])
        if before is not None and before.returncode is None:  # even a kill does not end it: the driver hangs
            raise LocalFault(f"{command[0]} of before has not ended yet")
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env={**os.environ, "LC_ALL": "C"},
            )
        except OSError as error:
            raise LocalFault(f"cannot run {command[0]}: {error.strerror}") from error
        self._programs[command[0]] = process
        assert process.stdout is not None
        data = b""
        try:
            while len(data) < MAX_BYTES and (part := await process.stdout.read(MAX_BYTES - len(data))):
                data += part
            code = await process.wait()
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        if code:
            raise LocalFault(f"{command[0]} ended with code {code}")
        return data.decode(errors="replace")


def _word(path: Path) -> str:
    """The one word of a file of the kernel; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(64).decode(errors="replace").strip()
    except OSError:
        return ""
