"""What the signals that ask a program to end do: the first one stops it in good order, the second one at once."""

import asyncio
import os
import signal
from collections.abc import Callable


class StopSignals:
    """SIGINT and SIGTERM: the first one calls `stop`, the second one ends the process at once."""

    def __init__(self, stop: Callable[[], object], on_end: Callable[[], object] = lambda: None) -> None:
        """Must be called in the running loop. `stop` may be replaced; `on_end` runs before the process ends."""
        self.stop = stop
        self._on_end = on_end
        self.has_come = False
        """The user asked to stop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self.has_come:  # an exception would unwind the loop, and each task that it interrupts would complain
            self._on_end()
            os._exit(130)
        self.has_come = True
        self.stop()
