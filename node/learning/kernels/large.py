"""Arrays of a model's size, in memory that is used again.

The system hands out large arrays page by page, each cleared at its first touch: to fill a fresh one takes two
and a half times as long as to fill one that was there. The fold makes an array a round and drops another one;
this keeps up to SPARE dropped ones of the size that is asked for. Where the system has huge pages, it is asked for
them.
"""

import ctypes
import mmap
import sys
import weakref

import torch
from torch import Tensor

LEAST_BYTES = 32 << 20
"""Smallest array that is handled here: the C library reuses smaller ones."""
SPARE = 2
_spare: list[mmap.mmap] = []


def fresh_like(values: Tensor) -> Tensor:
    """An array of this shape and dtype on the host, with any values."""
    size_bytes = values.numel() * values.element_size()
    if size_bytes < LEAST_BYTES or sys.platform == "win32":
        return torch.empty_like(values)
    memory = _take(size_bytes)
    # The finalizer hangs on the buffer object, which lives as long as any tensor that views it.
    lent = (ctypes.c_char * size_bytes).from_buffer(memory)
    weakref.finalize(lent, _give_back, memory).atexit = False
    return torch.frombuffer(lent, dtype=values.dtype).view(values.shape)


def _take(size_bytes: int) -> mmap.mmap:
    while _spare:
        memory = _spare.pop()
        if len(memory) == size_bytes:
            return memory
    return _map(size_bytes)


def _map(size_bytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without them: pages stay small
            return memory
    return memory


def _give_back(memory: mmap.mmap) -> None:
    if len(_spare) < SPARE:
        _spare.append(memory)
