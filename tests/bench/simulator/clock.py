"""Virtual time: a heap of timed calls."""

import heapq
from collections.abc import Callable
from itertools import count


class Clock:
    """Runs calls in the order of their times; equal times in the order in which they were made."""

    def __init__(self) -> None:
        self.now = 0.0
        """Virtual seconds since the beginning."""
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._tickets = count()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Run `call` so many seconds from now."""
        heapq.heappush(self._heap, (self.now + seconds, next(self._tickets), call))

    def run(self, until: float, done: Callable[[], bool] | None = None) -> None:
        """Run all calls up to this time, or until `done` after one of them."""
        while self._heap and self._heap[0][0] <= until:
            self.now, _, call = heapq.heappop(self._heap)
            call()
            if done is not None and done():
                return
        self.now = until
