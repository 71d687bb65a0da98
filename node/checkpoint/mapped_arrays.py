"""Arrays of a model's size in mapped files of the worker: pages of the page cache, not memory of the process.

The system writes such pages to the disk when it likes, and takes their memory back when it needs it. A state that
is saved is not written again: the generation gives its file a second name. Nobody changes an array after it was
saved (node/learning/outer/fold.py).

    HOME/runs/RUN/arrays/TOKEN-N      of this process; deleted when its array is dropped, or by the next process
"""

import ctypes
import errno
import logging
import mmap
import os
import secrets
import shutil
import weakref
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.node.checkpoint.disk import remove_tree
from atoll.node.learning.kernels.compiled import fresh_like
from atoll.p2p.system.atomic_files import disk

log = logging.getLogger(__name__)

ARRAYS = "arrays"
"""Folder of these files, beside that of the generations."""
SPARE = 3
"""Most dropped files that are used again: their pages are there already, which makes a fold twice as fast. That
of a saved state is free when the two generations that are kept are newer."""
_TRIED_BYTES = 1 << 12
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV, errno.ENOSYS}
"""Errors of file systems that cannot give a file a second name."""


class _MappedFile(NamedTuple):
    path: Path
    memory: mmap.mmap
    is_writable: bool = True
    """Whether what is written goes to the file."""


class MappedArrays:
    """Hands out arrays; where the file system cannot map files, arrays of the process's own memory."""

    def __init__(self, folder: Path) -> None:
        """`folder` is emptied: what an earlier process needs of it has names elsewhere. Raises DiskFault."""
        with disk(folder):
            remove_tree(folder)
            folder.mkdir(parents=True)
        self._folder = folder
        self._names = count()
        self._token = secrets.token_hex(4)
        self._files: dict[int, _MappedFile] = {}
        """By the address of the array."""
        self._spare: list[_MappedFile] = []
        self._can_map = self._tried()

    def fresh(self, like: Tensor) -> Tensor:
        """A new array with the shape and dtype of `like` and any values. Raises DiskFault if there is no room."""
        size_bytes = like.numel() * like.element_size()
        if not self._can_map or not size_bytes:
            return fresh_like(like)
        file = self._reused(size_bytes)
        if file is None:
            with disk(self._folder):
                file = self._made(size_bytes)
        return self._lent(file, like.dtype, tuple(like.shape))

    def path_of(self, values: Tensor) -> Path | None:
        """The file of an array that `fresh` or `opened` gave; None for any other."""
        file = self._files.get(values.data_ptr())
        return None if file is None else file.path

    def opened(self, path: Path, like: Tensor) -> Tensor:
        """An array with the values of a saved file, shape and dtype of `like`; neither is ever changed.

        Raises DiskFault.
        """
        if not self._can_map:
            return like.clone()
        own = self._new_path()
        with disk(path):
            link_or_copy(path, own)
            with own.open("rb") as file:
                # A private copy of each page that is written: a mistake here cannot change what was saved.
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._lent(_MappedFile(own, memory, is_writable=False), like.dtype, tuple(like.shape))

    def _tried(self) -> bool:
        """Whether files can be mapped here, and the disk be told to have room for them."""
        if os.name != "posix":
            return False
        try:
            file = self._made(_TRIED_BYTES)
            file.memory.close()
            file.path.unlink()
        except OSError as error:
            log.info("states are in memory, not in mapped files of %s: %s", self._folder, error.strerror)
            return False
        return True

    def _made(self, size_bytes: int) -> _MappedFile:
        """Raises OSError, and leaves no file then."""
        path = self._new_path()
        try:
            with path.open("x+b", buffering=0) as file:
                # All room is taken now: a full disk would end the process at a store into the mapping, later.
                _reserve(file.fileno(), size_bytes)
                return _MappedFile(path, mmap.mmap(file.fileno(), size_bytes))
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def _new_path(self) -> Path:
        return self._folder / f"{self._token}-{next(self._names)}"

    def _reused(self, size_bytes: int) -> _MappedFile | None:
        for file in list(self._spare):
            with suppress(OSError):  # the folder may be another process's now; what stays the next one deletes
                if len(file.memory) != size_bytes:
                    self._spare.remove(file)
                    file.path.unlink()
                elif file.path.stat().st_nlink == 1:  # no generation has it
                    self._spare.remove(file)
                    return file
        return None

    def _lent(self, file: _MappedFile, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        # The finalizer hangs on the buffer object, which lives as long as any tensor that views it.
        lent = (ctypes.c_char * len(file.memory)).from_buffer(file.memory)
        values = torch.frombuffer(lent, dtype=dtype).view(shape)
        self._files[values.data_ptr()] = file
        weakref.finalize(lent, _give_back, weakref.ref(self), values.data_ptr(), file).atexit = False
        return values

    def receive(self, address: int, file: _MappedFile) -> None:
        """An array was dropped: its file is used again, when no generation has it any more."""
        self._files.pop(address, None)
        if file.is_writable and len(self._spare) < SPARE:
            self._spare.append(file)
            return
        with suppress(OSError):
            file.path.unlink()


def _give_back(owner: "weakref.ref[MappedArrays]", address: int, file: _MappedFile) -> None:
    arrays = owner()
    if arrays is not None:
        arrays.receive(address, file)
        return
    with suppress(OSError):
        file.path.unlink()


def _reserve(descriptor: int, size_bytes: int) -> None:
    """Give a file this size and the disk's room for it. Raises OSError."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size_bytes)
        return
    zeros = bytes(1 << 20)  # macOS has no such call
    for at in range(0, size_bytes, len(zeros)):
        os.pwrite(descriptor, zeros[: size_bytes - at], at)


def link_or_copy(path: Path, to: Path) -> None:
    """Give a file a second name, or a copy that one where the file system has no hard links. Raises OSError."""
    try:
        os.link(path, to)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copyfile(path, to)
