"""How functions become machine code, by numba: on first use, for the worker only.

Machine code is kept on disk, so only the first worker of a machine waits for the compiler (`make setup` runs
`python -m atoll.node.worker.precompile`, and nobody waits). Where: NUMBA_CACHE_DIR if that is set, else the user's
cache folder, else a folder of the user's own in the folder for temporary files; in it one folder for each version
of the sources, because numba itself looks only at the file of the outermost function. Where nothing can be
written, each process compiles for itself. Files are written under another name and renamed, so processes that
compile at once do not harm each other; the keys hold the CPU's features.

ATOLL_KERNELS names a folder with machine code made earlier, as in a container image whose root is read-only: a
folder of this version in it is copied.
"""

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import numba
from platformdirs import user_cache_path

from atoll.protocols.run import arena, payload

F = TypeVar("F", bound=Callable[..., Any])
_PARTS = ("compress", "kernels", "outer")
"""Folders of learning/ that hold compiled functions."""


def compiled(function: F) -> F:
    """Machine code for `function` at its first call. It holds no lock on the interpreter: threads run beside it.

    It cannot allocate: arrays that it works in are arguments. So it counts no references either, which in the
    inner loops cost more than the arithmetic. Plain IEEE arithmetic: nothing is reassociated or contracted, so
    results are those of the plain version.
    """
    # No fastmath: it would reorder sums, and the bytes of a payload depend on their order.
    made: F = numba.njit(nogil=True, cache=_HAS_CACHE, error_model="numpy", _nrt=False)(function)
    return made


def inlined(function: F) -> F:
    """A part of compiled functions: becomes part of their text, because a call costs as much as a small loop."""
    made: F = numba.njit(nogil=True, error_model="numpy", inline="always")(function)
    return made


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
