"""Follows the progress of a starting node, and signals the node when one place of it is reached.

Python imports `sitecustomize` from PYTHONPATH at the start of a process. A place is a module whose body begins
(`load torch`) or a function of atoll that is called for the first time (`call node/daemon/app.py:Daemon.run`), in
the daemon or in its worker. Places follow from the node's own progress, so a busy machine changes none of them.
"""

import atexit
import inspect
import os
import signal
import sys

ROOT = os.environ["SIGNALS_ROOT"] + "/"
AREAS = tuple(ROOT + area for area in ("protocols", "p2p", "node", "cli"))
FOLDER = os.environ["SIGNALS_FOLDER"]
OVER = os.path.join(FOLDER, "over")
"""Exists once a start that is not told to stop at a place is over: from then on no place is noted."""
WORKER = "atoll.node.worker.main"
BEGIN = "call cli/main.py:_leave_to_kernel"
"""The first thing that our code does. What comes before it is the interpreter's own start."""


class Probe:
    """The trace function of one process."""

    def __init__(self) -> None:
        self.role = "worker" if WORKER in sys.orig_argv else "daemon"
        self.me = os.getpid()
        self.daemon = os.getppid() if self.role == "worker" else self.me
        self.seen: dict[str, None] = {}
        self.has_begun = False
        self.place, self.number = "", 0
        wanted = os.environ.get("SIGNALS_PLACE", "").split(" ", 1)
        if len(wanted) == 2 and wanted[0] == self.role:
            self.place, self.number = wanted[1], int(os.environ.get("SIGNALS_NUMBER", "0"))

    def __call__(self, frame, event, arg) -> None:
        code = frame.f_code
        if code.co_name == "<module>":
            place = f"load {frame.f_globals.get('__name__')}"
        elif code.co_flags & inspect.CO_OPTIMIZED and code.co_filename.startswith(AREAS):
            place = f"call {code.co_filename[len(ROOT) :]}:{code.co_qualname}"
        else:
            return
        if place in self.seen:
            return
        if not self.has_begun:
            self.has_begun = self.role == "worker" or place == BEGIN
            return
        if os.path.exists(OVER):
            return  # what only the end calls is no place of a start
        self.seen[place] = None
        if place == self.place:
            self.reach()

    def reach(self) -> None:
        """Say that the place was reached, and send the signal; SIGINT to the whole foreground group, as Ctrl-C."""
        with open(os.path.join(FOLDER, "reached"), "w"):
            pass
        if self.number == signal.SIGINT:
            os.killpg(self.daemon, self.number)
        elif self.number:
            os.kill(self.daemon, self.number)

    def write(self) -> None:
        """Leave the list of places, in order, for those who choose among them."""
        sys.settrace(None)
        if os.getpid() == self.me:
            with open(os.path.join(FOLDER, f"places-{self.role}"), "w") as file:
                file.writelines(f"{place}\n" for place in self.seen)


if any("atoll" in part for part in sys.orig_argv) and "-c" not in sys.orig_argv:
    probe = Probe()
    atexit.register(probe.write)
    sys.settrace(probe)
