"""What labs left behind whose process was killed: namespaces, with what runs inside, and folders."""

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil

from atoll_lab.namespaces import FOLDER, Namespace

PREFIX = "atollrig"
"""Names of namespaces and folders begin with it and the process id of their lab."""
CLOCK_S = 5.0
"""The start of a process and the age of a file are known from different clocks."""


def scratch() -> "tempfile.TemporaryDirectory[str]":
    """Return a folder for this process; if the process is killed, `sweep` removes it."""
    return tempfile.TemporaryDirectory(prefix=f"{PREFIX}-{os.getpid()}-")


def is_gone(owner: int, made_s: float) -> bool:
    """Whether the process that made something at `made_s`, Unix seconds, is gone. Numbers are used again."""
    try:
        return psutil.Process(owner).create_time() > made_s + CLOCK_S
    except psutil.NoSuchProcess:
        return True


def sweep() -> list[str]:
    """Remove what labs left whose process is gone; return the names of what was removed. Raises LabError."""
    names = [path.name for path in _left_in(FOLDER)]
    for name in names:
        Namespace(name).remove()
    # After the namespaces: what runs inside writes to the folders.
    folders = _left_in(Path(tempfile.gettempdir()))
    for path in folders:
        shutil.rmtree(path, ignore_errors=True)
    return names + [str(path) for path in folders]


def _left_in(folder: Path) -> list[Path]:
    found = []
    for path in sorted(folder.glob(f"{PREFIX}-*-*")) if folder.is_dir() else []:
        owner = path.name.split("-")[1]
        # Another lab may end, or sweep, at the same time: what is no longer there needs no sweep.
        with suppress(FileNotFoundError):
            if owner.isdecimal() and is_gone(int(owner), path.stat().st_mtime):
                found.append(path)
    return found
