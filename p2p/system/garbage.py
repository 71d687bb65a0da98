"""When Python's collector looks at the objects of a process: not while modules load, and not at theirs later.

Modules live as long as the process, and leave almost nothing to collect. A full collection is run whenever a
quarter more objects are there, so that loading 900 modules runs several.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected_imports() -> Iterator[None]:
    """Collect nothing within it; if it loads a module, leave what is there then out of later collections."""
    before, is_on = len(sys.modules), gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > before:
            gc.freeze()
        if is_on:
            gc.enable()


def settle_garbage(*, anew: bool = False) -> None:
    """Collect what start-up left, and leave what it made out of later collections. Call it once all parts run.

    Python looks through old objects only when a quarter as many have come to them: with 300,000 of modules that is
    once in hours, and what ended streams held until then was 5 to 10 MB (docs/chaos.md, soak).
    `anew`: look through what was left out before, too, as the parts of a chain that ended. It takes 0.05 s.
    """
    if anew:
        gc.unfreeze()
    gc.collect()
    gc.freeze()
