"""What the signals that ask a program to end do: the first one stops it in good order, the second one at once."""

import asyncio
import os
import signal
from collections.abc import Callable


class StopSignals:
    """SIGINT and SIGTERM: the first one calls `stop`, the second one ends the process at once.

    A terminal that is closed stops it, too, unless hang-ups are ignored (nohup). It never counts as the second
    one: a shell says it twice, and systemd beside SIGTERM.
    """

    def __init__(self, stop: Callable[[], object], on_end: Callable[[], object] = lambda: None) -> None:
        """Must be called in the running loop. `stop` may be replaced; `on_end` runs before the process ends."""
        self.stop = stop
        self._on_end = on_end
        self._has_come = self._is_asked = False
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, self._ask)

    def _on_signal(self) -> None:
        if self._has_come:  # an exception would unwind the loop, and each task that it interrupts would complain
            self._on_end()
            os._exit(130)
        self._has_come = True
        self._ask()

    def _ask(self) -> None:
        if not self._is_asked:
            self._is_asked = True
            self.stop()
