"""Keeps the node's books of time: hears the worker's readings, and looks what an idle worker waits for."""

import asyncio
from collections.abc import Callable

from atoll.node.daemon.rounds.types import RoundState
from atoll.node.daemon.telemetry.goodput import Books
from atoll.node.daemon.telemetry.idle_reason import UploadState, idle_as
from atoll.node.daemon.telemetry.round_log import RoundLog
from atoll.protocols.local.control_messages import Goodput
from atoll.protocols.local.worker_messages import TimeSpent

LOOK_S = 0.25


class Timekeeper:
    """Between the worker's supervisor, the round machine and the round log."""

    def __init__(
        self,
        log: RoundLog,
        now: Callable[[], float],
        state: Callable[[], RoundState],
        payload_bytes_up: Callable[[], int],
    ) -> None:
        """`payload_bytes_up`: contents of payloads that went to others, since the start."""
        self._log, self._now, self._state, self._payload_bytes_up = log, now, state, payload_bytes_up
        self._books = Books(now(), log.spend)
        self._sending = UploadState()

    async def serve(self) -> None:
        """Look until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """See what an idle worker waits for."""
        unsent = self._sending.unsent(self._log.newest_payload, self._payload_bytes_up())
        self._books.look(idle_as(self._state(), unsent=unsent), self._now())

    def on_spent(self, spent: TimeSpent) -> None:
        """A reply of the worker came with its books."""
        self.look()
        self._books.read(spent, self._now())

    def on_worker_gone(self) -> None:
        """The worker ended."""
        self._books.worker_gone(self._now())

    def report(self) -> Goodput:
        """For the status."""
        return self._books.report(self._now())
