"""One direction between two hosts of the simulated network: when things arrive, and in which order."""

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Quality:
    """One direction of a link."""

    latency_s: float = 0.0
    bandwidth_bps: float = math.inf
    """Bits per second."""
    loss: float = 0.0
    """Share of the parts that must be sent again."""


class Way:
    """From one host to another: parts leave one after the other and arrive in order."""

    def __init__(self, quality: Quality) -> None:
        self.quality = quality
        self.cut = False
        self._free_at_s = 0.0
        self._last_arrival_s = 0.0
        self._queue: deque[Callable[[], None]] = deque()
        self._held = 0

    def send(self, size: int, action: Callable[[], None], luck: random.Random) -> None:
        """`action` happens when `size` bytes have arrived."""
        loop = asyncio.get_running_loop()
        quality = self.quality
        self._free_at_s = max(self._free_at_s, loop.time()) + size * 8 / quality.bandwidth_bps
        arrival_s = self._free_at_s + quality.latency_s
        while quality.loss and luck.random() < quality.loss:
            arrival_s += max(0.2, 3 * quality.latency_s)
        self._last_arrival_s = max(self._last_arrival_s, arrival_s)
        self._queue.append(action)
        loop.call_at(self._last_arrival_s, self._arrive)

    def mend(self) -> None:
        """What was held back arrives."""
        self.cut = False
        for _ in range(self._held):
            self._queue.popleft()()
        self._held = 0

    def forget(self) -> None:
        """What was held back is lost."""
        for _ in range(self._held):
            self._queue.popleft()
        self._held = 0

    def _arrive(self) -> None:
        if self.cut:
            self._held += 1
        else:
            self._queue.popleft()()
