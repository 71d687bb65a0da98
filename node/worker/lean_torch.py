"""The import of torch without what a worker never uses, which is a third of the CPU that the import costs.

torch ends its own import with `torch._meta_registrations`: what each operator would return for tensors without
data, in Python, and a thousand decompositions. `torch.compile` and `torch.export` trace with them. A worker runs
its operators at once, so its results do not depend on them. What does need them imports them by their name, or
calls `whole_torch`. In a torch that has no such module this changes nothing.

Nor does the garbage collector find anything while modules are loaded, and it would look at all of them again and
again. They live as long as the process, so later collections leave them out, too.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

TRACING = "torch._meta_registrations"


@contextmanager
def lean_imports() -> Iterator[None]:
    """Within it the first `import torch` of a process leaves out what tracing needs, and nothing is collected."""
    gc.disable()
    sys.modules[TRACING] = ModuleType(TRACING)
    try:
        yield
    finally:
        del sys.modules[TRACING]
        gc.freeze()
        gc.enable()


def whole_torch() -> None:
    """Import what `lean_imports` left out, for code of others: it may trace, or use tensors without data."""
    import_module(TRACING)
