"""Records which modules of atoll run on the two walks of docs/architecture.md, in every process of a test.

Python imports `sitecustomize` from PYTHONPATH at the start of a process. Each process writes what it saw to the
folder WALK_FOLDER; the worker that trains first names the contribution that is followed there (`target`).

Walk (a), a contribution. A module is on it

- in the worker that trains, when a function of it is called between the end of the last inner step and the reply;
- in the daemons, when a function of it is called with the contribution or returns it: its payload's digest, its
  entry's id, the first bytes of its payload, or a value that holds one of these; until the other worker folded it;
- in the worker that folds, when a function of it is called between the request to fold and the reply.

Walk (b), `atoll start LINK` to the first inner step. A module is on it when a function of it, other than a
constructor, is called on the way: before the event loop, in the main task or a task of WAY, or in the worker.
Rooms that other rooms use as a library (LIBRARIES) count where another room calls them, not where they call
themselves. Calls during an import never count.
"""

import asyncio
import atexit
import inspect
import os
import sys
import threading
import time

FOLDER = os.environ["WALK_FOLDER"]
ROOT = os.environ["WALK_ROOT"] + "/"
TARGET = os.path.join(FOLDER, "target")
AREAS = ("protocols", "p2p", "node", "cli")
LIBRARIES = ("protocols/", "p2p/", "node/learning/", "node/checkpoint/")
WAY = ("driver", "trainer", "worker", "train")
"""Names of tasks, up to the first space, that carry a node from its start to the first step."""
CONSTRUCTORS = ("__init__", "__post_init__", "__new__")
STEP = ("node/learning/inner/loop.py", "step")
FIRST_ROUND = 2
"""Earlier rounds compile and warm up."""
DEPTH, WIDTH = 3, 64
"""How deep and how wide a value is searched for the contribution."""
LOOK_EVERY_S = 0.02


def place_of(frame) -> str:
    """The module of a frame as a path in the repository; empty for everybody else's."""
    path = frame.f_code.co_filename
    if not path.startswith(ROOT):
        return ""
    place = path[len(ROOT) :]
    return place if place.split("/", 1)[0] in AREAS else ""


def caller_of(frame) -> str:
    """The nearest module of ours that the frame was called from."""
    frame = frame.f_back
    while frame is not None and not place_of(frame):
        frame = frame.f_back
    return place_of(frame) if frame is not None else ""


def is_importing(frame) -> bool:
    """Whether the body of a module is being run."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__":
            return True
        frame = frame.f_back
    return False


def entered(place: str, caller: str) -> bool:
    """Whether a call is one of walk (b): a library counts where another room calls it."""
    library = next((each for each in LIBRARIES if place.startswith(each)), None)
    return library is None or (bool(caller) and not caller.startswith(library))


class Tracer:
    """The profile function of one process, and what it found."""

    def __init__(self) -> None:
        self.is_worker = "atoll.node.worker.main" in sys.orig_argv
        self.started: set[str] = set()
        self.walk: set[str] = set()
        self.since_step: set[str] = set()
        self.has_stepped = self.is_folding = self.is_over = False
        self.target: tuple[bytes, ...] = ()
        self.named_by = 0
        self.main_task: object = None
        self.looked_at = {"target": 0.0, "folded": 0.0, "stepped": 0.0}

    def __call__(self, frame, event, arg) -> None:
        if event not in ("call", "return") or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            return  # the bodies of modules and classes are not optimised: they are imports
        place = place_of(frame)
        if not place:
            return
        if event == "call" and not self.has_stepped:
            self.look_at_start(frame, place)
        if not self.is_over:
            (self.in_worker if self.is_worker else self.in_daemon)(frame, event, arg, place)

    # --- walk (b) -----------------------------------------------------------------------------

    def look_at_start(self, frame, place) -> None:
        is_new = place not in self.started and frame.f_code.co_name not in CONSTRUCTORS
        if is_new and entered(place, caller_of(frame)) and self.is_on_the_way() and not is_importing(frame):
            self.started.add(place)
        if not self.is_worker and self.is_time_for("stepped"):
            self.has_stepped = os.path.exists(os.path.join(FOLDER, f"stepped-{os.getpid()}"))

    def is_on_the_way(self) -> bool:
        if self.is_worker:
            return True
        if threading.current_thread() is not threading.main_thread():
            return False
        try:
            task = asyncio.current_task()
        except RuntimeError:
            return True  # no event loop runs yet
        if task is None:
            return False
        self.main_task = self.main_task or task
        return task is self.main_task or task.get_name().split(" ")[0] in WAY

    # --- walk (a), workers --------------------------------------------------------------------

    def in_worker(self, frame, event, arg, place) -> None:
        if (place, frame.f_code.co_name) == STEP:
            self.note_step(event)
        elif event == "call":
            self.since_step.add(place)
            if self.is_folding:
                self.walk.add(place)
            self.look_at_request(frame)
        if event == "return":
            self.look_at_reply(arg)

    def note_step(self, event) -> None:
        if event == "call" and not self.has_stepped:
            self.has_stepped = True
            self.note(f"stepped-{os.getppid()}")
        self.since_step.clear()

    def look_at_request(self, frame) -> None:
        for value in list(frame.f_locals.values())[:4]:
            if type(value).__name__ == "FoldRequest" and self.knows_target() and self.holds(value):
                self.is_folding = True

    def look_at_reply(self, value) -> None:
        value, *others = value if isinstance(value, tuple) and value else (value,)
        kind = type(value).__name__
        if kind == "TrainReply" and value.pending.round >= FIRST_ROUND and not os.path.exists(TARGET):
            self.name_target(value.pending.payload, bytes(others[0][:64]) if others else b"")
        if kind == "FoldReply" and self.is_folding:
            self.is_over = True
            if os.getpid() != self.named_by:
                self.note("folded")

    def name_target(self, payload: bytes, head: bytes) -> None:
        try:
            with open(TARGET + ".new", "x") as file:
                file.write(f"{payload.hex()}\n{head.hex()}\n{os.getpid()}\n")
        except FileExistsError:
            return  # another worker was first
        os.rename(TARGET + ".new", TARGET)
        self.walk |= self.since_step
        self.is_over = True

    # --- walk (a), daemons --------------------------------------------------------------------

    def in_daemon(self, frame, event, arg, place) -> None:
        if not self.knows_target() or self.is_folded():
            return
        if event == "return":
            found = self.holds(arg)
        else:
            code, values = frame.f_code, frame.f_locals
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            found = any(self.holds(values.get(name)) for name in names if name != "self")
        if found:
            self.walk.add(place)

    def knows_target(self) -> bool:
        if not self.target and self.is_time_for("target") and os.path.exists(TARGET):
            with open(TARGET) as file:
                payload, head, named_by = file.read().split("\n")[:3]
            self.named_by = int(named_by)
            self.target = (bytes.fromhex(payload), payload.encode())
            if head:
                self.target = (*self.target, bytes.fromhex(head))
        return bool(self.target)

    def is_folded(self) -> bool:
        if self.is_time_for("folded"):
            self.is_over = os.path.exists(os.path.join(FOLDER, "folded"))
        return self.is_over

    def holds(self, value, depth: int = 0) -> bool:
        """Whether the contribution is in `value`."""
        if isinstance(value, bytes | bytearray):
            return any(each in value for each in self.target)
        if isinstance(value, memoryview):
            return len(value) < 1 << 22 and self.holds(bytes(value))
        if isinstance(value, str):
            return self.target[1].decode() in value
        if depth == DEPTH or value is None or isinstance(value, int | float):
            return False
        if isinstance(value, tuple | list | frozenset | set) and len(value) <= WIDTH:
            return any(self.holds(each, depth + 1) for each in value)
        if isinstance(value, dict) and len(value) <= WIDTH:
            return any(self.holds(each, depth + 1) for each in (*value, *value.values()))
        return self.holds_in_fields(value, depth)

    def holds_in_fields(self, value, depth: int) -> bool:
        kind = type(value)
        fields = getattr(kind, "__struct_fields__", None) or getattr(kind, "__dataclass_fields__", ())
        if not fields or not getattr(kind, "__module__", "").startswith("atoll."):
            return hasattr(value, "__fspath__") and self.holds(os.fspath(value))
        found = any(self.holds(getattr(value, name, None), depth + 1) for name in fields)
        if found and kind.__name__ == "Entry" and value.id not in self.target:
            self.target = (*self.target, value.id)
        return found

    # --- all ----------------------------------------------------------------------------------

    def is_time_for(self, what: str) -> bool:
        now = time.monotonic()
        if now - self.looked_at[what] < LOOK_EVERY_S:
            return False
        self.looked_at[what] = now
        return True

    def note(self, what: str) -> None:
        with open(os.path.join(FOLDER, what), "w"):
            pass

    def write(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)
        role = "worker" if self.is_worker else "daemon"
        with open(os.path.join(FOLDER, f"{role}-{os.getpid()}"), "w") as file:
            for label, places in (("start", self.started), ("walk", self.walk)):
                file.writelines(f"{label} {place}\n" for place in sorted(places))


def install() -> None:
    tracer = Tracer()
    atexit.register(tracer.write)
    threading.setprofile(tracer)
    sys.setprofile(tracer)


if any("atoll" in part for part in sys.orig_argv):
    install()
