"""An asyncio event loop whose clock jumps to the next timer as soon as nothing is ready.

Hours of simulated time pass in seconds, and two runs of the same program take the same steps: tasks and
futures hash by their number, so that sets of them iterate in one order; executor functions run in line.
Iterate over sorted sets of strings: their order depends on PYTHONHASHSEED.
"""

import asyncio
import itertools
import random
import selectors
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Stuck(RuntimeError):
    """No timer, no ready callback, and the program has not ended: a deadlock."""


def run_virtual(main: Coroutine[Any, Any, T], seed: int = 0) -> T:
    """Run `main` on virtual time that starts at 0; module `random` is seeded. Raises Stuck on a deadlock."""
    state = random.getstate()
    random.seed(seed)
    try:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            return runner.run(main)
    finally:
        random.setstate(state)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer when nothing else is ready."""

    def __init__(self) -> None:
        self._virtual_s = 0.0
        self._numbers = itertools.count(1)
        super().__init__(_JumpingSelector(self._jump))
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        """Virtual seconds since the start."""
        return self._virtual_s

    def create_future(self) -> "asyncio.Future[Any]":
        """Return a future with a stable hash."""
        return _NumberedFuture(next(self._numbers), self)

    def run_in_executor(self, executor: Any, func: Callable[[*Ts], T], *args: *Ts) -> "asyncio.Future[T]":
        """Run `func` now, in this thread: with another thread the order of events would vary."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _jump(self, seconds: float) -> None:
        self._virtual_s += seconds

    def _make_task(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> "asyncio.Task[Any]":
        return _NumberedTask(next(self._numbers), coro, loop, options)


class _NumberedTask(asyncio.Task[Any]):
    def __init__(
        self, number: int, coro: Any, loop: asyncio.AbstractEventLoop, options: Mapping[str, Any]
    ) -> None:
        self._number = number
        super().__init__(coro, loop=loop, **options)

    def __hash__(self) -> int:
        return self._number


class _NumberedFuture(asyncio.Future[Any]):
    def __init__(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        self._number = number
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that advances the clock where the real one would sleep."""

    def __init__(self, jump: Callable[[float], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return the events that are ready; if there are none, jump over `timeout` seconds."""
        events = super().select(0)
        if events or timeout == 0:
            return events
        if timeout is None:
            raise Stuck("nothing is ready and no timer is set")
        self._jump(timeout)
        return []
