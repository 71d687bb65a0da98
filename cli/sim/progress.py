"""One line a phase while `atoll sim` runs: redrawn in place on a terminal, elsewhere printed now and then."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from atoll.cli.formatting import span

EVERY_S = 20.0
"""Between two lines of a phase where they cannot be redrawn."""
PACE_S = 2.0
"""A phase has no pace, and so no time left, before this."""
_ERASE = "\r\x1b[K"


class Progress:
    """Writes the line of the phase at hand, with the time left, to `out`."""

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._clock = clock
        self._redraws = out.isatty()
        self._phase = ""
        self._line = ""
        self._began = 0.0
        self._printed_at = -EVERY_S

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Lines inside the block belong to phase `name`; its last line stays, with the time that it took."""
        self._phase = name
        self._line = ""
        self._began = self._clock()
        self._printed_at = self._began - EVERY_S
        try:
            yield
        finally:
            erase = _ERASE if self._redraws else ""
            self._write(f"{erase}{self._line}  took {span(self._clock() - self._began)}\n")

    def update(self, share: float, text: str) -> None:
        """The phase's line now. `share` is the part of the phase that is done, 0 to 1."""
        self._line = f"{self._phase:<14} {text}"
        line = f"{self._line}  {self._left(share)}".rstrip()
        if self._redraws:
            self._write(_ERASE + line[: shutil.get_terminal_size().columns - 1])
        elif self._clock() - self._printed_at >= EVERY_S:
            self._printed_at = self._clock()
            self._write(line + "\n")

    def note(self, text: str) -> None:
        """A line of its own for something that happened once."""
        self._write(f"{_ERASE if self._redraws else ''}{text}\n")

    def _left(self, share: float) -> str:
        """The rest of the phase at the pace so far; empty before there is a pace."""
        passed_s = self._clock() - self._began
        known = passed_s >= PACE_S and 0 < share < 1
        return f"about {span(max(1, round(passed_s * (1 - share) / share)))} left" if known else ""

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
