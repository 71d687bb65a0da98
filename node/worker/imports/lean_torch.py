"""The import of torch without what a worker never uses, which is a third of the CPU that the import costs.

torch ends its own import with `torch._meta_registrations`: what each operator would return for tensors without
data, in Python, and a thousand decompositions. `torch.compile` and `torch.export` trace with them. A worker runs
its operators at once, so its results do not depend on them. They are imported when torch's compiler is, as some
of torch's own functions do, or by `whole_torch`. In a torch that has no such module this changes nothing.

Some of its packages nobody in a worker asks for: they are there, and run when somebody does (`importlib.util`).

One of its modules asks from which module it is called. Python's answer finds the real path of each module that is
there, 1,100 by then, which is a tenth of the import. The caller's globals have the name.
"""

import inspect
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from types import FrameType, ModuleType

from atoll.p2p.system.garbage import uncollected_imports
from atoll.p2p.system.interned_names import settle_interned_names

TRACING = "torch._meta_registrations"
TRACERS = "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor"
OPTIONAL = "dill", "scipy", "yaml"
"""What torch and numba load if it is there: pickles, linear algebra in compiled code, a config file in the folder
where the node was started."""
LATE = frozenset(
    f"torch.{name}"
    for name in [
        "ao",
        "distributions",
        "masked",
        "nn.intrinsic",
        "nn.qat",
        "nn.quantizable",
        "nn.quantized",
        "profiler",
        "quantization",
        "utils.data",
    ]
)
"""Packages for users of torch, 200 modules, on which no other part of it depends. Of those that depend on each
other many do so in circles, which only one order of imports loads."""
_BLAS_THREADS = "OPENBLAS_NUM_THREADS"
_searched_module = inspect.getmodule


class _TracingFirst(MetaPathFinder):
    """Imports what was left out before what traces: these modules import each other, and only in this order."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname in TRACERS:
            whole_torch()


class _RunWhenAsked(MetaPathFinder):
    """Makes the modules of LATE, which run when one of their attributes is asked for."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname in LATE else None
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec


def _module_of(found: object, _filename: str | None = None) -> ModuleType | None:
    """`inspect.getmodule`, for a frame by the name that its globals have."""
    if isinstance(found, FrameType):
        return sys.modules.get(found.f_globals.get("__name__", ""))
    return _searched_module(found, _filename)


@contextmanager
def lean_imports() -> Iterator[None]:
    """Within it the first `import torch` of a process leaves out what tracing needs, and nothing is collected."""
    sys.modules[TRACING] = ModuleType(TRACING)
    left_out = dict.fromkeys(set(OPTIONAL) - sys.modules.keys())  # None: the import says that it is not there
    sys.modules.update(left_out)  # type: ignore[arg-type]
    inspect.getmodule = _module_of  # type: ignore[assignment]  # it names an argument `object`
    sys.meta_path.insert(0, run_when_asked := _RunWhenAsked())
    try:
        with uncollected_imports():
            _import_numpy()
            yield
    finally:
        sys.meta_path.remove(run_when_asked)
        for name in (TRACING, *left_out):
            del sys.modules[name]
        inspect.getmodule = _searched_module
        sys.meta_path.insert(0, _TracingFirst())
        settle_interned_names()


def _import_numpy() -> None:
    """Import it without threads: its BLAS begins one per core, each spins for 25 ms, and nothing here uses it.

    torch may have a BLAS that asks the same variable, so it is as it was when torch is imported.
    """
    before = os.environ.get(_BLAS_THREADS)
    os.environ[_BLAS_THREADS] = "1"
    try:
        import_module("numpy")
    finally:
        del os.environ[_BLAS_THREADS]
        if before is not None:
            os.environ[_BLAS_THREADS] = before


def whole_torch() -> None:
    """Import what `lean_imports` left out, for code of others: it may trace, or use tensors without data."""
    import_module(TRACING)
    for name in LATE:
        if (module := sys.modules.get(name)) is not None:
            vars(module)  # any attribute runs it
