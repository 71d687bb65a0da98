"""Records which modules of atoll a contribution passes through, in every process that Python starts with this folder.

Python imports `sitecustomize` by itself from PYTHONPATH. `WALK_FOLDER` is where each process writes what it saw, and
where the worker of the first node names the contribution that is followed (`target`). A module is on the walk when

- worker of the first node: one of its functions runs between the last inner step and the reply that ends the round;
- worker of the second node: one of its functions runs between the request to fold that names the payload, and its reply;
- daemons: one of its functions is called with, or returns, the contribution: its payload's digest, its entry's id,
  the first bytes of its payload, or anything that holds one of these.

For the start of a node, every module counts of which a function runs before the first step.
"""

import atexit
import inspect
import os
import sys
import threading
import time

FOLDER = os.environ["WALK_FOLDER"]
ROOTS = tuple(os.environ["WALK_ROOTS"].split(os.pathsep))
TARGET = os.path.join(FOLDER, "target")
FIRST_ROUND = 2
"""Earlier rounds compile and warm up."""
DEPTH, WIDTH = 3, 64
LOOK_EVERY_S = 0.02


class Tracer:
    """The profile function of one process, and what it found."""

    def __init__(self) -> None:
        self.is_worker = "atoll.node.worker.main" in sys.orig_argv
        self.started: dict[str, None] = {}
        """Modules that ran before the first inner step."""
        self.walk: dict[str, None] = {}
        self.since_step: dict[str, None] = {}
        self.has_stepped = self.is_folding = self.is_over = False
        self.target: tuple[bytes, ...] = ()
        self.looked_at = self.asked_at = 0.0

    def __call__(self, frame, event, arg) -> None:
        if event not in ("call", "return"):
            return
        code = frame.f_code
        if not code.co_filename.startswith(ROOTS) or not code.co_flags & inspect.CO_OPTIMIZED:
            return  # not ours, or the body of a module or of a class
        module = code.co_filename
        if not self.has_stepped:
            lab = label_of(frame)
            if (module, lab) not in self.started and not is_importing(frame):
                self.started[(module, lab)] = None
            self.look_for_step()
        if self.is_over:
            return
        if self.is_worker:
            self.in_worker(frame, event, arg, module)
        else:
            self.in_daemon(frame, event, arg, module)

    def look_for_step(self) -> None:
        """Whether the worker of this daemon has made its first step."""
        now = time.monotonic()
        if not self.is_worker and now - self.asked_at > LOOK_EVERY_S:
            self.asked_at = now
            self.has_stepped = os.path.exists(os.path.join(FOLDER, f"stepped-{os.getpid()}"))

    # --- the worker ---------------------------------------------------------------------------

    def in_worker(self, frame, event, arg, module) -> None:
        name = frame.f_code.co_name
        if module.endswith("learning/inner/loop.py") and name == "step":
            self.note_step(event)
        elif event == "call":
            self.since_step.setdefault(module)
        if self.is_folding:
            self.walk.setdefault(module)
        if event == "call":
            self.look_at_request(frame)
        if event == "return":
            self.look_at_reply(arg)

    def note_step(self, event) -> None:
        """The walk to a first step ends where one begins; the walk of a contribution begins where the last one ends."""
        if event == "call" and not self.has_stepped:
            self.has_stepped = True
            self.note(f"stepped-{os.getppid()}")
        self.since_step.clear()

    def look_at_request(self, frame) -> None:
        if self.is_folding or frame.f_code.co_argcount == 0:
            return
        for value in list(frame.f_locals.values())[:4]:
            if type(value).__name__ == "FoldRequest" and self.know_target() and self.holds(value):
                self.is_folding = True

    def look_at_reply(self, value) -> None:
        value, *others = value if isinstance(value, tuple) and value else (value,)
        kind = type(value).__name__
        if kind == "TrainReply" and value.pending.round >= FIRST_ROUND and not os.path.exists(TARGET):
            head = bytes(others[0][:64]) if others else b""
            self.name_target(value.pending.payload, head)
        if kind == "FoldReply" and self.is_folding:
            self.is_folding, self.is_over = False, True
            if os.getpid() != int(self.maker):
                self.note("folded")

    def name_target(self, payload: bytes, head: bytes) -> None:
        try:
            with open(TARGET + ".new", "x") as file:
                file.write(f"{payload.hex()}\n{head.hex()}\n{os.getpid()}\n")
        except FileExistsError:
            return
        os.rename(TARGET + ".new", TARGET)
        self.walk.update(self.since_step)
        self.is_over = True

    # --- the daemon ---------------------------------------------------------------------------

    def in_daemon(self, frame, event, arg, module) -> None:
        if not self.know_target() or self.is_folded():
            return
        if event == "return":
            found = self.holds(arg)
        else:
            names = frame.f_code.co_varnames[: frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount]
            values = frame.f_locals
            found = any(self.holds(values.get(name)) for name in names if name != "self")
        if found:
            self.walk.setdefault(module)

    def know_target(self) -> bool:
        if not self.target and time.monotonic() - self.looked_at > LOOK_EVERY_S:
            self.looked_at = time.monotonic()
            if os.path.exists(TARGET):
                with open(TARGET) as file:
                    *words, self.maker = file.read().split("\n")[:3]
                payload, head = map(bytes.fromhex, words)
                self.target = (payload, payload.hex().encode(), *([head] if head else []))
        return bool(self.target)

    def is_folded(self) -> bool:
        """Whether the other node's worker has folded the contribution: the end of its walk."""
        if time.monotonic() - self.looked_at > LOOK_EVERY_S:
            self.looked_at = time.monotonic()
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
        fields = getattr(type(value), "__struct_fields__", None) or getattr(
            type(value), "__dataclass_fields__", ()
        )
        if not fields or not getattr(type(value), "__module__", "").startswith("atoll."):
            return hasattr(value, "__fspath__") and self.holds(os.fspath(value))
        found = any(self.holds(getattr(value, name, None), depth + 1) for name in fields)
        if found and type(value).__name__ == "Entry" and value.id not in self.target:
            self.target = (*self.target, value.id)
        return found

    # --- both ---------------------------------------------------------------------------------

    def note(self, what: str) -> None:
        path = os.path.join(FOLDER, what)
        if not os.path.exists(path):
            with open(path, "w"):
                pass

    def write(self) -> None:
        role = "worker" if self.is_worker else "daemon"
        with open(os.path.join(FOLDER, f"{role}-{os.getpid()}"), "w") as file:
            file.writelines(f"label {m} {lab}\n" for m, lab in self.started)
            for label, modules in (("start", dict.fromkeys(m for m, _ in self.started)), ("walk", self.walk)):
                file.writelines(f"{label} {module}\n" for module in modules)


def label_of(frame):
    import asyncio

    name = frame.f_code.co_name
    back = frame.f_back
    while back is not None and (not back.f_code.co_filename.startswith(ROOTS)):
        back = back.f_back
    parent = (
        "none"
        if back is None
        else next(r for r in ROOTS if back.f_code.co_filename.startswith(r)).split("/")[-2]
        + "/"
        + back.f_code.co_filename.split("/")[-2]
    )
    return parent + ":" + label_rest(frame)


def label_rest(frame):
    import asyncio

    name = frame.f_code.co_name
    init = "init" if name in ("__init__", "__post_init__", "__new__") else "call"
    if threading.current_thread() is not threading.main_thread():
        return f"thread:{init}"
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return f"noloop:{init}"
    if task is None:
        return f"callback:{init}"
    return f"{task.get_name().split('-')[0].split(' ')[0]}:{init}"


def is_importing(frame) -> bool:
    """Whether the body of a module is being run: what it calls is no part of a walk."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__":
            return True
        frame = frame.f_back
    return False


def install() -> None:
    tracer = Tracer()
    atexit.register(tracer.write)
    threading.setprofile(tracer)
    sys.setprofile(tracer)


if any("atoll" in part for part in sys.orig_argv):
    install()
