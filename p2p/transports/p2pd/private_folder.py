"""The private folder of p2pd, in the system's temporary one: its sockets, and the key while it starts."""

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from atoll.protocols.errors import LocalFault

_PREFIX: Final = "atoll-p2pd-"
_LOCK_FILE: Final = "lock"
_SOCKET_PATH_MAX_BYTES: Final = 100  # sun_path has 104 (macOS) or 108 (Linux)
_FRESH_S: Final = 60.0


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A 0700 folder with a short path, removed at the end; folders of dead processes are removed too.

    Raises LocalFault if there is no place for it.
    """
    try:
        root = tempfile.gettempdir()
        if len(os.fsencode(root)) + len(_PREFIX) + 20 > _SOCKET_PATH_MAX_BYTES:
            root = "/tmp"  # mkdtemp makes an unguessable 0700 folder below it
        _sweep(Path(root))
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
    except OSError as error:
        raise no_folder(error) from error
    try:
        with (folder / _LOCK_FILE).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make_own(folder: Path) -> None:
    """Make a `private_folder` again that somebody removed. Raises OSError, also if another user made one."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if folder.lstat().st_uid != os.getuid():  # of a link, its maker
        raise PermissionError(errno.EPERM, "another user's", str(folder))


def no_folder(error: OSError) -> LocalFault:
    """What is told of a temporary folder that cannot be made or written to."""
    return LocalFault(f"no temporary folder: {error.strerror}", hint="make room in /tmp, or set TMPDIR")


def _sweep(root: Path) -> None:
    """Remove our folders whose owner was killed: nobody holds their lock, and no new owner is about to lock it."""
    for lock_file in root.glob(f"{_PREFIX}*/{_LOCK_FILE}"):
        with contextlib.suppress(OSError), lock_file.open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - lock_file.stat().st_mtime < _FRESH_S:
                continue
            shutil.rmtree(lock_file.parent, ignore_errors=True)
