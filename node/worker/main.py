"""The worker process: torch, data, compression, fold; no sockets. `python -m atoll.node.worker.main`.

Requests come on stdin, replies go to the original stdout; whatever libraries print, from their import on, goes
to stderr (the log).
"""

import faulthandler
import logging
import os
import sys

from atoll.node.ipc.framing import Inbox, ReplyWriter
from atoll.node.worker.imports.lean_torch import lean_imports
from atoll.p2p.system.c_heap import keep_heap_end, use_one_arena
from atoll.p2p.system.quick_end import end_process


def main() -> None:
    """Redirect stdin and stdout, then serve. A crash in machine code leaves a traceback in the log."""
    use_one_arena()  # before numba and torch begin threads
    keep_heap_end()
    faulthandler.enable()
    replies = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    with lean_imports():
        from atoll.node.worker.loop import Worker

    try:
        Worker(Inbox(0), ReplyWriter(replies)).run()
    except BrokenPipeError:
        return


if __name__ == "__main__":
    main()
    end_process()
