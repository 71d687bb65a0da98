"""A control group with a limit of memory, of either version. Needs root, or a group that was handed out."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import PIPE

from tests.chaos.report import NotRun
from tests.waiting import poll

ROOT = Path("/sys/fs/cgroup")
PREFIX = "atoll-chaos-"
EATS = """
import sys, time
held = [b"x" * (1 << 20) for _ in range(int(sys.argv[1]))]
time.sleep(3600)
"""


class MemoryGroup:
    """Processes that share a limit; the kernel ends one of them when it is reached."""

    def __init__(self, folder: Path, names: tuple[str, str, str]) -> None:
        self.folder = folder
        self._limit, self._used, self._events = names

    def add(self, pid: int) -> None:
        """Put a process here; those that it starts from now on are here too."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    def set_limit(self, size: int) -> None:
        """In bytes. Raises OSError where less than what is used cannot be freed."""
        (self.folder / self._limit).write_text(str(size))

    @property
    def used(self) -> int:
        """Bytes, with cached files."""
        return int((self.folder / self._used).read_text())

    @property
    def kills(self) -> int:
        """How many processes the kernel ended here."""
        said = dict(line.split() for line in (self.folder / self._events).read_text().splitlines())
        return int(said["oom_kill"])

    @contextmanager
    def eaten(self, size: int) -> Iterator[None]:
        """While the block runs, another process wants so many bytes. The kernel ends whoever holds most."""
        with subprocess.Popen([sys.executable, "-c", f"input()\n{EATS}", str(size >> 20)], stdin=PIPE) as eater:
            try:
                self.add(eater.pid)
                assert eater.stdin is not None
                eater.stdin.write(b"\n")
                eater.stdin.flush()
                yield
            finally:
                eater.kill()


VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control")
VERSION_2 = ("memory.max", "memory.current", "memory.events")


@contextmanager
def memory_group(name: str) -> Iterator[MemoryGroup]:
    """A group of its own below, or beside, that of this process. Raises NotRun where none can be made."""
    place, names = place_of(Path("/proc/self/cgroup").read_text())
    folder = place / f"{PREFIX}{os.getpid()}-{name}"
    try:
        folder.mkdir()
    except OSError as error:
        raise NotRun(f"LACK OF MEMORY IS NOT TESTED HERE: no control group ({error})") from error
    try:
        if not (folder / names[0]).exists():
            raise NotRun(f"LACK OF MEMORY IS NOT TESTED HERE: {place} hands out no memory controller")
        yield MemoryGroup(folder, names)
    finally:
        poll("the group is empty", lambda: not (folder / "cgroup.procs").read_text().strip())
        with suppress(FileNotFoundError):
            folder.rmdir()


def place_of(own: str, root: Path = ROOT) -> tuple[Path, tuple[str, str, str]]:
    """The folder in which a group can be made, and the names of its files, by what /proc/self/cgroup says."""
    groups = {kind: path for _, kind, path in (line.split(":", 2) for line in own.split())}
    if "memory" in groups:
        return root / "memory" / groups["memory"].lstrip("/"), VERSION_1
    # A group with processes has no groups with limits below it: its neighbours may have.
    return (root / groups.get("", "/").lstrip("/")).parent if groups.get("", "/") != "/" else root, VERSION_2
