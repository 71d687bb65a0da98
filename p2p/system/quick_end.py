"""The end of a process that has loaded torch, without the second that Python needs to take it apart."""

import atexit
import os
import sys
import threading


def end_process() -> None:
    """End the process well, in the order of the interpreter: threads, what is registered for the end, streams.

    The interpreter would then take torch's modules apart, which takes 0.8 s of CPU, and whoever ends the process
    waits for it. Never returns.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # atexit's functions count on it: no thread works any more
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
