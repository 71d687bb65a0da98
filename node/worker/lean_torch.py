"""The import of torch without what a worker never uses, which is a third of the CPU that the import costs.

torch ends its own import with `torch._meta_registrations`: what each operator would return for tensors without
data, in Python, and a thousand decompositions. `torch.compile` and `torch.export` trace with them. A worker runs
its operators at once, so its results do not depend on them. They are imported when torch's compiler is, as some
of torch's own functions do, or by `whole_torch`. In a torch that has no such module this changes nothing.

One of its modules asks from which module it is called. Python's answer finds the real path of each module that is
there, 1,100 by then, which is a tenth of the import. The caller's globals have the name.
"""

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import MetaPathFinder
from types import FrameType, ModuleType

from atoll.p2p.system.garbage import uncollected_imports
from atoll.p2p.system.interned_names import settle_interned_names

TRACING = "torch._meta_registrations"
TRACERS = "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor"
OPTIONAL = "dill", "scipy", "yaml"
"""What torch and numba load if it is there: pickles, linear algebra in compiled code, a config file in the folder
where the node was started."""
_searched_module = inspect.getmodule


class _TracingFirst(MetaPathFinder):
    """Imports what was left out before what traces: these modules import each other, and only in this order."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname in TRACERS:
            whole_torch()


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
    try:
        with uncollected_imports():
            yield
    finally:
        for name in (TRACING, *left_out):
            del sys.modules[name]
        inspect.getmodule = _searched_module
        sys.meta_path.insert(0, _TracingFirst())
        settle_interned_names()


def whole_torch() -> None:
    """Import what `lean_imports` left out, for code of others: it may trace, or use tensors without data."""
    import_module(TRACING)
