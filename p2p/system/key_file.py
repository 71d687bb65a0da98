"""The node's private key on disk: 32 secret bytes in a file that only its owner can read.

The file is written once, whole or not at all, and never overwritten: the key is the node's identity in every run.
"""

import os
import stat
from pathlib import Path

from atoll.p2p.system.atomic_files import sync_folder
from atoll.protocols.errors import ConfigError, DiskFault
from atoll.protocols.identity import Identity

SEED_BYTES = 32


def load_or_create(path: Path) -> Identity:
    """The identity stored at `path`; creates one if there is no file.

    Raises ConfigError when others may read the file or it is damaged, DiskFault when the disk refuses.
    """
    try:
        return load(path)
    except FileNotFoundError:
        return store(path, os.urandom(SEED_BYTES))


def store(path: Path, seed: bytes) -> Identity:
    """Write a new identity unless the file exists; returns the identity of the file. Raises as `load`."""
    try:
        _create(path, seed)
        return load(path)
    except OSError as error:
        raise DiskFault(f"cannot write the key file {path}: {error}") from error


def load(path: Path) -> Identity:
    """The identity at `path`. Raises FileNotFoundError, and ConfigError if others may read it or it is damaged."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"cannot read the key file {path}: {error}", hint="check its owner and mode") from error
    try:
        _require_private(path, os.fstat(descriptor))
        seed = os.read(descriptor, SEED_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(seed) != SEED_BYTES:
        raise ConfigError(
            f"the key file {path} has not {SEED_BYTES} bytes",
            hint="restore it from a backup, or move it away to get a new identity",
        )
    return Identity(seed)


def _require_private(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"the key file {path} is not a regular file", hint="move it away")
    if status.st_mode & 0o077:
        raise ConfigError(f"others may read the key file {path}", hint=f"chmod 600 {path}")


def _create(path: Path, seed: bytes) -> None:
    """Write a temporary file, sync it, and link it to `path`, which must be free: a whole file or none."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(seed)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(beside, path)
        except FileExistsError:
            return  # another process of ours was first: its key counts
    finally:
        beside.unlink(missing_ok=True)
    sync_folder(path.parent)
