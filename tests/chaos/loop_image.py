"""A file system in a file: what a copy of the file holds is what a disk would hold if the power went now.

What was written and not synced is in the kernel's memory only, and not in the copy. Needs root and loop devices.
"""

import ctypes
import json
import os
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.chaos.report import NotRun

SIZE_MB = 192
CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
LIBC = ctypes.CDLL(None, use_errno=True)
OPTIONS = "loop,commit=300"
"""The journal is written when something is synced, and hardly ever otherwise: a power loss loses all the rest."""
PREFIX = "atoll-chaos-"


@contextmanager
def mounted(image: Path, at: Path) -> Iterator[None]:
    """A fresh ext4 in the file `image`, mounted at the folder `at`. Raises NotRun where none can be had."""
    with image.open("wb") as file:
        file.truncate(SIZE_MB << 20)
    at.mkdir(parents=True, exist_ok=True)
    try:
        _run("mkfs.ext4", "-q", "-F", str(image))
        _run("mount", "-o", OPTIONS, str(image), str(at))
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        raise NotRun(f"POWER LOSS IS NOT TESTED HERE: no loop mounts (root is needed): {said.strip()}") from error
    try:
        at.chmod(0o700)
        yield
    finally:
        _run("umount", "-l", str(at))


def in_copy(image: Path, at: Path, act: Callable[[], list[str]]) -> list[str]:
    """What `act` returns where the copy `image` is mounted at `at`, unseen by others and without a network."""
    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        with os.fdopen(read, encoding="utf-8") as pipe:
            text = pipe.read()
        os.waitpid(child, 0)
        found: list[str] = json.loads(text) if text else ["the process that opened the copy died"]
        return found
    try:
        found = _inside(image, at, act)
    except BaseException:
        found = [traceback.format_exc()]
    with os.fdopen(write, "w", encoding="utf-8") as pipe:
        pipe.write(json.dumps(found))
    os._exit(0)


def _inside(image: Path, at: Path, act: Callable[[], list[str]]) -> list[str]:
    if LIBC.unshare(CLONE_NEWNS | CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    _run("mount", "--make-rprivate", "/")
    _run("mount", "-o", OPTIONS, str(image), str(at))
    _run("ip", "link", "set", "lo", "up")
    try:
        return act()
    finally:
        _run("umount", "-l", str(at))


def sweep() -> list[str]:
    """Unmount what a case left whose process was killed; the mounts that were there."""
    with open("/proc/mounts") as file:
        places = [line.split()[1] for line in file]
    root, left = Path(tempfile.gettempdir()) / PREFIX, []
    for place in places:
        if place.startswith(str(root)):
            owner = place[len(str(root)) :].split("-")[0]
            if owner.isdecimal() and not psutil.pid_exists(int(owner)):
                _run("umount", "-l", place)
                left.append(place)
    return left


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=60)
