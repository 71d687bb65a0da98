"""The progress of long work: a bar on a terminal, a line every ten seconds elsewhere, nothing for short work."""

import sys
import time
from collections.abc import Callable
from types import TracebackType

import click

from atoll.cli.formatting import size, span

QUIET_S = 1.0
"""Work that takes less shows nothing."""
REDRAW_S = 0.1
LINE_EVERY_S = 10.0
"""Interval of the lines where stderr is no terminal: a log must stay short, and has no control characters."""
WIDTH = 30


class ProgressLine:
    """A context that draws on stderr how much of some work is done; the line is gone when the work has ended."""

    def __init__(self, name: str, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._quiet = quiet
        self._clock = clock
        self._began_s: float | None = None
        self._drawn_s = 0.0
        self._is_drawn = False
        self._is_terminal = sys.stderr.isatty()

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_drawn and self._is_terminal:
            click.echo("\r\x1b[K", nl=False, err=True)

    def begin(self, name: str) -> None:
        """Another part of the work begins, whose pace is its own."""
        if name != self._name:
            self._name, self._began_s, self._drawn_s = name, None, 0.0

    def show(self, done: int, of: int, *, is_bytes: bool = False) -> None:
        """Draw that `done` of `of` are done, if it is time; may be called as often as one likes.

        `of` 0: nobody knows how much there is, so there is no bar and no estimate.
        """
        if self._began_s is None:  # what came before the first part is not the work
            self._began_s = self._clock()
        took_s = self._clock() - self._began_s
        if self._quiet or took_s < QUIET_S:
            return
        if not self._is_terminal:
            if took_s - self._drawn_s >= LINE_EVERY_S:
                click.echo(self._text(done, of, took_s, is_bytes=is_bytes), err=True)
                self._drawn_s = took_s
        elif (of and done >= of) or took_s - self._drawn_s >= REDRAW_S:
            filled = round(WIDTH * min(1.0, done / of)) if of else 0
            bar = f"{'█' * filled}{'░' * (WIDTH - filled)} " if of else ""
            click.echo(f"\r\x1b[K{bar}{self._text(done, of, took_s, is_bytes=is_bytes)}", nl=False, err=True)
            self._drawn_s, self._is_drawn = took_s, True

    def _text(self, done: int, of: int, took_s: float, *, is_bytes: bool) -> str:
        amount = size(done) if is_bytes else str(done)
        if not of:
            return f"{self._name} {amount}, {span(took_s)} so far"
        share = min(1.0, done / of)
        left = f", about {span(took_s * (1 - share) / share)} left" if 0 < share < 1 else ""
        return f"{self._name} {share:4.0%} ({amount} of {size(of) if is_bytes else of}){left}"
