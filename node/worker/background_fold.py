"""Asks about the fold that are worked on beside the inner steps, one after the other, as they came.

Their work changes nothing and may take its time in a thread. What comes of it the caller does, between two steps.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from atoll.protocols.local.worker_messages import Answer, RequestEnvelope

Commit = Callable[[], Answer]
"""Makes the change and answers. Raises AtollError."""


class BackgroundResult(NamedTuple):
    """An ask whose work is done, or failed."""

    request: RequestEnvelope
    commit: Commit
    """Raises also what its work raised."""


class Beside:
    """The daemon has few asks under way at a time: they need no bound of their own."""

    def __init__(self, ended: Callable[[], None]) -> None:
        """`ended` is called when a work has ended, well or not, from its thread."""
        self._ended = ended
        self._threads = ThreadPoolExecutor(1, "fold")
        self._waiting: deque[tuple[RequestEnvelope, Callable[[], Commit]]] = deque()
        self._running: tuple[RequestEnvelope, Future[Commit]] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether an ask is not answered yet."""
        return self._running is not None or bool(self._waiting)

    def add(self, request: RequestEnvelope, work: Callable[[], Commit]) -> None:
        """Begin with it when all that came before are answered."""
        self._waiting.append((request, work))
        self._begin_next()

    def take(self, *, wait: bool = False) -> BackgroundResult | None:
        """The oldest, if its work has ended; `wait`: until it has. The next begins with the next call.

        So its commit comes before the next one's work looks at the fold.
        """
        self._begin_next()
        if self._running is None or not (wait or self._running[1].done()):
            return None
        (request, future), self._running = self._running, None
        return BackgroundResult(request, lambda: future.result()())

    def _begin_next(self) -> None:
        if self._running is not None or not self._waiting:
            return
        request, work = self._waiting.popleft()
        future = self._threads.submit(work)
        self._running = request, future
        future.add_done_callback(lambda _: self._ended())
