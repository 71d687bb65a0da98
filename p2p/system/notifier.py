"""Notifier: wakes a task that re-reads state after changes. Notifications coalesce, and none is lost."""

import asyncio


class Notifier:
    """Wakes its one waiting task once for any number of changes since it last waited."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Report a change; the waiting task wakes."""
        self._event.set()

    async def wait(self) -> None:
        """Return after the next change, or at once if there was one since the last wait. Safe to cancel."""
        await self._event.wait()
        self._event.clear()
