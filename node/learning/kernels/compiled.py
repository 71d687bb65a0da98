"""Compiled kernels: how functions become machine code, stores that bypass the caches, and large arrays used
again.

Functions are compiled by numba on first use, in the worker only.

Machine code is kept on disk, so only the first worker of a machine waits for the compiler (`make setup` runs
`atoll node kernels`, and nobody waits). Where: NUMBA_CACHE_DIR if that is set, else the
user's cache folder, else a folder of the user's own in the folder for temporary files; in it one folder for each
version of the sources, because numba itself looks only at the file of the outermost function. Where nothing can
be written, each process compiles for itself. Files are written under another name and renamed, so processes that
compile at once do not harm each other; the keys hold the CPU's features.

ATOLL_KERNELS names a folder with machine code made earlier, as in a container image whose root is read-only: a
folder of this version in it is copied.

Streaming stores are written in LLVM's terms, because numba's Python has no word for them. A fold writes every
weight once and reads none of what it wrote. An ordinary store first fetches the line that it overwrites; a
non-temporal one does not, which is a third of the memory traffic of θ + U.

Arrays of a model's size come from memory that is used again. The system hands out large arrays page by page, each
cleared at its first touch: to fill a fresh one takes two and a half times as long as to fill one that was there.
The fold makes an array a round and drops another one; this keeps up to SPARE dropped ones of the size that is
asked for. Where the system has huge pages, it is asked for them.
"""

import ctypes
import math
import mmap
import os
import shutil
import stat
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.caching import FunctionCache
from numba.extending import intrinsic
from platformdirs import user_cache_path
from torch import Tensor

from atoll.protocols.run import arena, payload
from atoll.protocols.run.arena import CHUNK

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Ints32 = npt.NDArray[np.int32]
Marks = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
_PARTS = ("compress", "kernels", "outer", "outer/rules", "zeroth_order")
"""Folders of learning/ that hold compiled functions."""
ALIGN_BYTES = 64
"""Alignment of a row that is written: streaming stores to others fault. Rows are 16 KiB, so that of the array."""
_LANES = ALIGN_BYTES // 4
_INT = ir.IntType(32)
_WORD = ir.IntType(64)
_VECTOR = ir.VectorType(_INT, _LANES)
_ZERO = ir.Constant(_VECTOR, [0] * _LANES)
Made = tuple[Any, Callable[..., Any]]
Fresh = Callable[[Tensor], Tensor]
"""Makes an array with the shape and dtype of this one, on the host, with any values, as `fresh_like` does."""
LEAST_BYTES = 32 << 20
"""Smallest array that is handled here: the C library reuses smaller ones."""
SPARE = 2
_spare: list[mmap.mmap] = []


class KeptCode(FunctionCache):  # type: ignore[misc]  # numba has no types
    """Machine code on disk, which is loaded without the compiler.

    numba's own class would first load all that it can compile: 0.4 s of CPU, with scipy's linear algebra. Machine
    code that is whole needs none of it, and for a function that is not there the compiler loads it by itself.
    """

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The machine code for these types, or None."""
        with self._guard_against_spurious_io_errors():
            return self._load_overload(sig, target_context)


def compiled(function: F) -> F:
    """Machine code for `function` at its first call. It holds no lock on the interpreter: threads run beside it.

    It cannot allocate: arrays that it works in are arguments. So it counts no references either, which in the
    inner loops cost more than the arithmetic. Plain IEEE arithmetic: nothing is reassociated or contracted, so
    results are those of the plain version.
    """
    # No fastmath: it would reorder sums, and the bytes of a payload depend on their order.
    made = numba.njit(nogil=True, error_model="numpy", _nrt=False)(function)
    if _HAS_CACHE:
        made._cache = KeptCode(function)
    return cast(F, made)


def inlined(function: F) -> F:
    """A part of compiled functions: becomes part of their text, because a call costs as much as a small loop."""
    made: F = numba.njit(nogil=True, error_model="numpy", inline="always")(function)
    return made


def each_range(count: int, threads: int, work: Callable[[int, int], T]) -> list[T]:
    """`work(start, stop)` of one range of `0 … count - 1` for each thread, at the same time."""
    share = max(1, math.ceil(count / max(1, threads)))
    ranges = [(start, min(start + share, count)) for start in range(0, count, share)]
    # Compiled code holds no lock on the interpreter, so plain threads run beside each other.
    if len(ranges) == 1:
        return [work(*ranges[0])]
    with ThreadPoolExecutor(max_workers=max(1, len(ranges))) as pool:
        return list(pool.map(lambda span: work(*span), ranges))


def usable_folder(folder: Path) -> bool:
    """Whether files can be made in `folder`, and nobody else could; it is made if it is not there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return _is_own(folder)
    except OSError:
        return False


def _is_own(folder: Path) -> bool:
    """Whether only this user can write here: machine code that others write would run as us."""
    if not hasattr(os, "getuid"):
        return True
    found = folder.stat()
    return found.st_uid == os.getuid() and not found.st_mode & stat.S_IWOTH


def version_of_sources() -> str:
    """A hash of every source that machine code is made of; it names the cache's folder."""
    node = Path(__file__).parents[1]
    files = [file for part in _PARTS for file in (node / part).glob("*.py")]
    files += [Path(payload.__file__), Path(arena.__file__)]
    return blake2b(b"".join(file.read_bytes() for file in sorted(files)), digest_size=8).hexdigest()


def _places() -> Iterator[Path]:
    if "NUMBA_CACHE_DIR" in os.environ:
        yield Path(os.environ["NUMBA_CACHE_DIR"])
        return
    yield user_cache_path("atoll") / "kernels"
    yield Path(tempfile.gettempdir()) / f"atoll-kernels-{os.getuid() if hasattr(os, 'getuid') else 'user'}"


def _choose_cache() -> bool:
    """Choose the folder of machine code; whether there is one."""
    version = version_of_sources()
    for place in _places():
        if usable_folder(place) and usable_folder(place / version):
            numba.config.CACHE_DIR = str(place / version)
            _copy_ready(place / version, version)
            return True
    return False


def _copy_ready(folder: Path, version: str) -> None:
    ready = Path(os.environ.get("ATOLL_KERNELS", "")) / version
    if "ATOLL_KERNELS" in os.environ and ready.is_dir() and not any(folder.iterdir()):
        shutil.copytree(ready, folder, dirs_exist_ok=True)


_HAS_CACHE = _choose_cache()


def in_llvm(function: Callable[..., Made]) -> Callable[..., Any]:
    """A function that writes the LLVM code of its own call; numba hands it its context first, then the types."""
    made: Callable[..., Any] = intrinsic(function)
    return made


def _vectors(context: Any, builder: Any, signature: Any, args: Any, number: int, *index: Any) -> Any:
    """Pointer to a vector of an argument that is an array."""
    array = context.make_array(signature.args[number])(context, builder, args[number])
    at = cgutils.get_item_pointer(context, builder, signature.args[number], array, index)
    return builder.bitcast(at, _VECTOR.as_pointer())


def _store_past(builder: Any, value: Any, at: Any) -> None:
    # Aligned by the row and the caller's check: an unaligned streaming store faults.
    past = builder.store(value, at, align=ALIGN_BYTES)
    past.set_metadata("nontemporal", builder.module.add_metadata([_INT(1)]))


@in_llvm
def add_to(_: Any, out: Any, theta: Any, moves: Any, row: Any) -> Made:
    """out[row] ← θ[row] + moves, and moves ← 0; int32 of 4096. False where a sum does not fit int32."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = partial(_vectors, context, builder, signature, args)
        wrong = cgutils.alloca_once_value(builder, _ZERO)
        with cgutils.for_range(builder, _WORD(CHUNK // _LANES)) as loop:
            first = builder.mul(loop.index, _WORD(_LANES))
            own = vectors(2, first)
            before = builder.load(vectors(1, args[3], first), align=4)
            gain = builder.load(own, align=4)
            after = builder.add(before, gain)
            # Overflow flips the sign of both addends at once: the sign bits of `left` gather that for all lanes.
            left = builder.and_(builder.xor(before, after), builder.xor(gain, after))
            builder.store(builder.or_(builder.load(wrong), left), wrong)
            builder.store(_ZERO, own, align=4)
            _store_past(builder, after, vectors(0, args[3], first))
        lanes = builder.load(wrong)
        signs = [builder.extract_element(lanes, _INT(lane)) for lane in range(_LANES)]
        worst = signs[0]
        for sign in signs[1:]:
            worst = builder.or_(worst, sign)
        return builder.icmp_signed(">=", worst, _INT(0))

    return types.boolean(out, theta, moves, types.int64), code


@in_llvm
def stream(_: Any, out: Any, row: Any, first: Any, values: Any, size: Any) -> Made:
    """out[row, first …] ← the first `size` values, past the caches; int32, multiples of 16."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = partial(_vectors, context, builder, signature, args)
        with cgutils.for_range_slice(builder, _WORD(0), args[4], _WORD(_LANES), inc=True) as (at, _):
            past = vectors(0, args[1], builder.add(args[2], at))
            _store_past(builder, builder.load(vectors(3, at), align=4), past)
        return context.get_dummy_value()

    return types.void(out, types.int64, types.int64, values, types.int64), code


@in_llvm
def fence(_: Any) -> Made:
    """Make all earlier stores, streaming ones too, visible to other threads before any later one."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), code


def untouched_zeros(chunks: int, device: torch.device | str) -> Tensor:
    """Zeros, float32 `[chunks, 4096]`. On the host a row takes no memory before it is written."""
    if torch.device(device).type != "cpu" or not chunks or sys.platform == "win32":
        return torch.zeros((chunks, CHUNK), device=device)
    # torch writes its zeros. Pages of the system read as zeros, and are there when they are written: small ones,
    # because a huge page holds the rows of many experts. (numpy's zeros ask for huge ones.)
    memory = mmap.mmap(-1, 4 * chunks * CHUNK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.float32).view(chunks, CHUNK)


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
