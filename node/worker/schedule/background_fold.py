"""Requests about the fold that are worked on beside the inner steps, one after the other, as they came.

The work changes nothing and runs in a thread. The caller commits its result between two steps.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from atoll.protocols.local.worker_messages import Answer, RequestEnvelope

Commit = Callable[[], Answer]
"""Makes the change and answers. Raises AtollError."""


class BackgroundResult(NamedTuple):
    """A request whose work is done, or failed."""

    request: RequestEnvelope
    commit: Commit
    """Makes the change and answers; raises what the work raised."""


class BackgroundFold:
    """A queue of such requests; without a bound, because the daemon has few under way at a time."""

    def __init__(self, ended: Callable[[], None]) -> None:
        """`ended` is called when a work has ended, well or not, from its thread."""
        self._ended = ended
        self._threads = ThreadPoolExecutor(1, "fold")
        self._waiting: deque[tuple[RequestEnvelope, Callable[[], Commit]]] = deque()
        self._running: tuple[RequestEnvelope, Future[Commit]] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a request is not answered yet."""
        return self._running is not None or bool(self._waiting)

    def add(self, request: RequestEnvelope, work: Callable[[], Commit]) -> None:
        """Begin with this request when all that came before are answered."""
        self._waiting.append((request, work))
        self._begin_next()

    def next_result(self, *, wait: bool = False) -> BackgroundResult | None:
        """The oldest request if its work has ended; `wait`: until it has. The next one begins with the next call.

        So the commit of a request comes before the work of the next one looks at the fold.
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
