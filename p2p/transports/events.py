"""The events of a host, delivered to any number of subscribers, each with a bounded queue."""

import asyncio
import weakref
from collections import deque

from atoll.p2p.host.interface import HostEvent

_QUEUE_EVENTS = 1024


class Subscription:
    """Iterates over the events since its creation. A reader that is slower than the queue loses the oldest."""

    def __init__(self) -> None:
        self._events: deque[HostEvent] = deque()
        self._wake = asyncio.Event()
        self._ended = False

    def push(self, event: HostEvent) -> None:
        """Queue an event."""
        if len(self._events) >= _QUEUE_EVENTS:
            self._events.popleft()
        self._events.append(event)
        self._wake.set()

    def end(self) -> None:
        """End the iteration after the queued events."""
        self._ended = True
        self._wake.set()

    def __aiter__(self) -> "Subscription":
        return self

    async def __anext__(self) -> HostEvent:
        while not self._events:
            if self._ended:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._events.popleft()


class Announcer:
    """Hands every event to all live subscriptions; it does not keep a subscription alive."""

    def __init__(self) -> None:
        self._subscriptions: weakref.WeakSet[Subscription] = weakref.WeakSet()

    def subscribe(self) -> Subscription:
        """Return a subscription to all events from now on."""
        subscription = Subscription()
        self._subscriptions.add(subscription)
        return subscription

    def announce(self, event: HostEvent) -> None:
        """Queue `event` at every subscription."""
        for subscription in tuple(self._subscriptions):
            subscription.push(event)

    def end(self) -> None:
        """End all subscriptions: the host has stopped."""
        for subscription in tuple(self._subscriptions):
            subscription.end()
