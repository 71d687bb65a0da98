"""Python's table of interned strings, brought at once to the size that it gets in the first hours of a node.

`pathlib` interns each part of a path. A name that nobody holds leaves the table, its place stays used. Once all
places are used Python makes the table anew, for three times the strings that it holds: with the strings of our
modules twice the size. That is a step of one megabyte in a daemon, and of two in a worker.
"""

import sys
from collections import deque

_NAMES = 45_000
"""More than the free places of a table of 2¹⁷, as a worker has: at most half of 87,381. They cost 7 ms of CPU."""


def settle_interned_names() -> None:
    """Let the table grow now, by names that are dropped at once. Call it when modules are loaded."""
    deque(map(sys.intern, map("name {}".format, range(_NAMES))), maxlen=0)  # in C: a start waits for it
