"""A wake-up call for a listener who re-reads the state: rings coalesce, so nothing queues and nothing is lost."""

import asyncio


class Notifier:
    """Rings once for any number of changes since its listener last waited. One listener each."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Something changed."""
        self._event.set()

    async def wait(self) -> None:
        """Return after the next ring, or at once if it rang since the last wait. Safe to cancel."""
        await self._event.wait()
        self._event.clear()
