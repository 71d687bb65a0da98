"""The one place that knows numba: functions compiled on first use, for the worker only.

Machine code is kept on disk, so only the first worker of a machine waits for the compiler. Files are written
under another name and renamed, so processes that compile at once do not harm each other; the keys hold the
source's time and size and the CPU's features. Where nothing can be written, each process compiles for itself.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
from platformdirs import user_cache_path

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Machine code for `function` at its first call. It holds no lock on the interpreter: threads run beside it.

    It cannot allocate: arrays that it works in are arguments. So it counts no references either, which in the
    inner loops cost more than the arithmetic. Plain IEEE arithmetic: nothing is reassociated or contracted, so
    results are those of the plain version.
    """
    made: F = numba.njit(nogil=True, cache=_KEPT, error_model="numpy", _nrt=False)(function)
    return made


def inlined(function: F) -> F:
    """A part of compiled functions: becomes part of their text, because a call costs as much as a small loop."""
    made: F = numba.njit(nogil=True, error_model="numpy", inline="always")(function)
    return made


def usable_folder(folder: Path) -> bool:
    """Whether files can be made in `folder`; it is made if it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _keep() -> bool:
    """Choose where machine code is kept; the user's own NUMBA_CACHE_DIR comes first."""
    if "NUMBA_CACHE_DIR" in os.environ:
        return usable_folder(Path(os.environ["NUMBA_CACHE_DIR"]))
    folder = user_cache_path("atoll") / "kernels"
    if not usable_folder(folder):
        return False
    numba.config.CACHE_DIR = str(folder)
    return True


_KEPT = _keep()
