"""Writes files whole or not at all; the one place where OSError becomes DiskFault."""

import errno
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from atoll.protocols.errors import CorruptFault, DiskFault

_HINTS = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "the disk quota is used up; free some space",
    errno.EFBIG: "a file size limit is in force; raise it (ulimit -f)",
    errno.EROFS: "the file system is read-only; remount it or choose another --home",
    errno.EIO: "the disk fails to read or write; check it and choose another --home",
    errno.EACCES: "check who owns the folder, or choose another --home",
    errno.EPERM: "check who owns the folder, or choose another --home",
    errno.EISDIR: "a folder is in the place of a file; move it away",
    errno.ENXIO: "a pipe or a socket is in the place of a file; move it away",
    errno.EOPNOTSUPP: "a socket is in the place of a file; move it away",  # as macOS says it
    errno.ENOENT: "the folder is gone; start the node again, or choose another --home",
}


def disk_fault(error: OSError, path: Path) -> DiskFault:
    """DiskFault for `error`, with a hint for the user."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    hint = _HINTS.get(error.errno or 0, "check the disk")
    return DiskFault(f"{path}: {reason}", hint=hint)


@contextmanager
def disk(path: Path) -> Iterator[None]:
    """Context manager that raises DiskFault for every OSError inside the block."""
    try:
        yield
    except OSError as error:
        raise disk_fault(error, path) from error


def make_folder(path: Path) -> Path:
    """Create the folder `path` (0700) and its parents; return it. Raises DiskFault."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileNotFoundError as error:  # with its parents, so nothing was there that is gone
        raise DiskFault(f"{path}: this folder cannot be made", hint="choose another --home") from error
    except OSError as error:
        raise disk_fault(error, path) from error
    return path


def write_whole(path: Path, data: bytes, *, mode: int = 0o600, syncs_folder: bool = True) -> None:
    """Replace `path` by `data`; after a power loss it holds the old bytes or the new. Raises DiskFault.

    `syncs_folder`: whether the new ones are durable when it returns; if not, the caller syncs the folder.
    """
    temp = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_native_id()}.tmp")
    with disk(path):
        try:
            descriptor = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
            with open(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temp, path)
        except OSError:
            temp.unlink(missing_ok=True)
            raise
    if syncs_folder:
        sync_folder(path.parent)


def open_file(path: Path) -> BinaryIO:
    """Open the file `path` for reading. Raises OSError, and DiskFault for a pipe, a device or a folder."""
    # A pipe that nobody writes to would block this thread, and with it the signals that end a node.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DiskFault(f"{path} is not a file", hint="move it away")
    return open(descriptor, "rb")


def read_whole(path: Path, *, max_bytes: int) -> bytes | None:
    """Bytes of the file `path`; None if it does not exist. Raises DiskFault, CorruptFault above `max_bytes`."""
    with disk(path):
        try:
            with open_file(path) as file:
                data = file.read(max_bytes + 1)
        except FileNotFoundError:
            return None
    if len(data) > max_bytes:
        raise CorruptFault(f"{path} has more than {max_bytes} bytes", hint="move it away and start again")
    return data


def sync_folder(folder: Path) -> None:
    """Make renames and new names inside `folder` durable. Raises DiskFault."""
    with disk(folder):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
