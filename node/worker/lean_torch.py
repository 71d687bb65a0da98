"""The import of torch without what a worker never uses, which is a third of the CPU that the import costs.

torch ends its own import with `torch._meta_registrations`: what each operator would return for tensors without
data, in Python, and a thousand decompositions. `torch.compile` and `torch.export` trace with them. A worker runs
its operators at once, so its results do not depend on them. They are imported when torch's compiler is, as some
of torch's own functions do, or by `whole_torch`. In a torch that has no such module this changes nothing.

Nor does the garbage collector find anything while modules are loaded, and it would look at all of them again and
again. They live as long as the process, so later collections leave them out, too.
"""

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import MetaPathFinder
from types import ModuleType

from atoll.p2p.system.interned_names import settle_interned_names

TRACING = "torch._meta_registrations"
COMPILER = "torch._dynamo"


class _TracingFirst(MetaPathFinder):
    """Imports what was left out before the compiler: its modules import each other, and only in this order."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname == COMPILER:
            whole_torch()


@contextmanager
def lean_imports() -> Iterator[None]:
    """Within it the first `import torch` of a process leaves out what tracing needs, and nothing is collected."""
    gc.disable()
    sys.modules[TRACING] = ModuleType(TRACING)
    try:
        yield
    finally:
        del sys.modules[TRACING]
        sys.meta_path.insert(0, _TracingFirst())
        gc.freeze()
        gc.enable()
        settle_interned_names()


def whole_torch() -> None:
    """Import what `lean_imports` left out, for code of others: it may trace, or use tensors without data."""
    import_module(TRACING)
