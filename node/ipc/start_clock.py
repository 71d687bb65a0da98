"""How far the start of a worker is, and how long the rest takes, by the newest start that was whole.

A start has phases that the worker names (`StartProgress`). Their seconds are kept beside its log. A phase that
takes longer than last time has no estimate: what makes it longer, a compiler or a fetch, is not known here.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from atoll.p2p.system.atomic_files import read_whole, write_whole
from atoll.protocols import codec
from atoll.protocols.errors import CorruptFault, DecodeError, DiskFault
from atoll.protocols.local.progress import StartProgress, WorkProgress

log = logging.getLogger(__name__)
LOADING = "loading its program"
"""The phase before the worker can say anything: Python, torch and the compiler are loaded."""
MAX_BYTES = 4096


class StartTimes(msgspec.Struct, frozen=True, array_like=True):
    """The file: seconds of each phase of the newest whole start, in their order."""

    phases: tuple[tuple[str, float], ...]
    v: Literal[1] = 1


class StartClock:
    """The clock of one worker's starts. `path`: where the seconds of the newest whole start are."""

    def __init__(self, path: Path, now: Callable[[], float]) -> None:
        self._path = path
        self._now = now
        self._before = _read(path)
        self._took: dict[str, float] = {}
        """Seconds of the phases of this start that are over."""
        self._phase: StartProgress | None = None
        self._since = 0.0
        self._began = 0.0

    def begin(self, *, is_loaded: bool = False) -> None:
        """The process begins, or has been asked to start: what it waited for its daemon is no part of a start.

        `is_loaded`: it served another daemon before.
        """
        self._took, self._phase = {}, None if is_loaded else StartProgress(LOADING)
        self._since = self._began = self._now()

    def advance(self, said: StartProgress) -> None:
        """The worker says what it does."""
        if self._phase is None or said.phase != self._phase.phase:
            self._book()
            self._since = self._now()
        self._phase = said

    def end(self, *, is_whole: bool) -> None:
        """The worker answers requests, or (not `is_whole`) it is gone."""
        self._book()
        self._phase = None
        if not is_whole:
            return
        self._before |= self._took
        try:
            write_whole(self._path, codec.encode(StartTimes(tuple(self._before.items()))))
        except DiskFault as error:  # the next start has the estimate of an older one
            log.debug("%s", error.line())

    def _book(self) -> None:
        if self._phase is not None:
            self._took[self._phase.phase] = self._now() - self._since

    def progress(self) -> WorkProgress | None:
        """How far the start is; None while none is under way."""
        phase = self._phase
        if phase is None:
            return None
        return WorkProgress(
            work=phase.phase,
            took_s=self._now() - self._began,
            left_s=self._left_s(phase),
        )

    def _left_s(self, phase: StartProgress) -> float | None:
        if phase.phase not in self._before:
            return None
        left_s = self._before[phase.phase] - (self._now() - self._since)
        names = list(self._before)
        later = names[names.index(phase.phase) + 1 :]
        return None if left_s < 0 else left_s + sum(self._before[name] for name in later)


def _read(path: Path) -> dict[str, float]:
    """Seconds by phase, in their order; empty where there are none. A damaged file costs only an estimate."""
    try:
        data = read_whole(path, max_bytes=MAX_BYTES)
        return dict(codec.decode(data, StartTimes).phases) if data is not None else {}
    except (CorruptFault, DecodeError, DiskFault) as error:
        log.debug("%s", error.line())
        return {}
