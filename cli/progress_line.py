"""The progress of long work: a bar on a terminal, a line at each quarter elsewhere, nothing for short work."""

import sys
import time
from collections.abc import Callable
from types import TracebackType

import click

from atoll.cli.formatting import span

QUIET_S = 1.0
"""Work that takes less shows nothing."""
REDRAW_S = 0.1
WIDTH = 30
QUARTERS = 4


class ProgressLine:
    """A context that draws on stderr how much of some work is done; the line is gone when the work has ended."""

    def __init__(self, name: str, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._quiet = quiet
        self._clock = clock
        self._began_s: float | None = None
        self._drawn_s = 0.0
        self._is_drawn = False
        self._quarter = 0
        self._is_terminal = sys.stderr.isatty()

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_drawn and self._is_terminal:
            click.echo("\r\x1b[K", nl=False, err=True)

    def show(self, done: int, of: int, unit: str = "") -> None:
        """Draw that `done` of `of` are done, if it is time; may be called as often as one likes."""
        if self._began_s is None:  # what came before the first part is not the work
            self._began_s = self._clock()
        took_s = self._clock() - self._began_s
        if self._quiet or of <= 0 or took_s < QUIET_S:
            return
        share = min(1.0, done / of)
        left = f", about {span(took_s * (1 - share) / share)} left" if 0 < share < 1 else ""
        text = f"{self._name} {share:4.0%}{unit and ' ' + unit}{left}"
        if not self._is_terminal:
            self._line(text, int(share * QUARTERS))
        elif done >= of or took_s - self._drawn_s >= REDRAW_S:
            filled = round(WIDTH * share)
            click.echo(f"\r\x1b[K{'█' * filled}{'░' * (WIDTH - filled)} {text}", nl=False, err=True)
            self._drawn_s, self._is_drawn = took_s, True

    def _line(self, text: str, quarter: int) -> None:
        if quarter > self._quarter:
            self._quarter = quarter
            click.echo(text, err=True)
