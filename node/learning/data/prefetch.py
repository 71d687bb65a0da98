"""The batch of the next step, loaded while a step runs: a device does not wait for the disk between two steps."""

from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

Load = Callable[[], NDArray[np.int64]]
"""Loads a batch `[B, T + 1]`, int64; it runs in another thread than its caller's."""


class NextBatch:
    """Holds at most one batch that was not asked for yet."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, "batch")
        self._begun: tuple[Hashable, Future[NDArray[np.int64]]] | None = None

    def begin(self, key: Hashable, load: Load) -> None:
        """Load the batch with this key in the background; what was begun before is dropped."""
        self._begun = key, self._threads.submit(load)

    def get(self, key: Hashable, load: Load) -> NDArray[np.int64]:
        """The batch with this key, loaded now unless it was begun. Raises what `load` raises."""
        begun, self._begun = self._begun, None
        if begun is None or begun[0] != key:
            return load()
        return begun[1].result()
