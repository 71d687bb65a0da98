"""Reads the sensors every few seconds and holds the node, or lets it go, as the user's limits say."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Protocol, TypeVar

from atoll.node.config.guest import GuestLimits
from atoll.node.guest.decision import MAY_TRAIN, Readings, Verdict, may_train
from atoll.protocols.errors import LocalFault

T = TypeVar("T")
log = logging.getLogger(__name__)

SAMPLE_S = 10.0
READ_S = 5.0
"""Longest read of one sensor. One that takes longer limits nothing until it answers again."""


class GuestSensors(Protocol):
    """What a machine can tell. Each raises LocalFault for what it cannot read."""

    async def on_battery(self) -> bool:
        """Return whether the machine runs on its battery."""

    async def idle_s(self) -> float:
        """Return the seconds since somebody used the machine."""

    async def gpu_c(self) -> int:
        """Return the temperature of the hottest GPU, in °C."""


class GuestWatch:
    """The limits of one node's user, applied."""

    def __init__(
        self,
        limits: GuestLimits,
        sensors: GuestSensors,
        hold: Callable[[str], None],
        local_now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`hold` gets each new reason to rest, and an empty one when the node may train again."""
        self._limits = limits
        self._sensors = sensors
        self._hold = hold
        self._local_now = local_now
        self._faults: dict[str, str] = {}
        self.verdict: Verdict = MAY_TRAIN

    @property
    def trouble(self) -> str:
        """Return which sensors cannot be read, in one line; empty if all can."""
        return "; ".join(f"guest.{key} limits nothing: {why}" for key, why in self._faults.items())

    def left_s(self) -> float | None:
        """Return the seconds until the node may train again; None if it may now, or where nobody knows."""
        end = self.verdict.goes_on
        return None if end is None else max(0.0, (end - self._local_now()).total_seconds())

    async def serve(self, on_up: Callable[[], None] = lambda: None) -> None:
        """Run until cancelled. `on_up` is called after the first verdict, before which nothing should train."""
        if not self._limits.limits_anything:
            on_up()
            return
        while True:
            await self.sample()
            on_up()
            await asyncio.sleep(self._wait_s())

    async def sample(self) -> None:
        """Read every sensor that a limit needs, and judge once."""
        limits, sensors = self._limits, self._sensors
        readings = Readings(
            on_battery=await self._read("battery", sensors.on_battery) if limits.mains_only else None,
            idle_s=await self._read("idle_after", sensors.idle_s) if limits.idle_s is not None else None,
            gpu_c=await self._read("gpu_most_c", sensors.gpu_c) if limits.gpu_most_c is not None else None,
        )
        before, self.verdict = self.verdict, may_train(limits, readings, self._local_now(), self.verdict)
        if self.verdict.reason != before.reason:
            self._hold(self.verdict.reason)

    async def _read(self, key: str, read: Callable[[], Awaitable[T]]) -> T | None:
        """The reading; None where there is none, which is logged once until there is one again."""
        try:
            async with asyncio.timeout(READ_S):
                found = await read()
        except TimeoutError:
            why = f"no answer in {READ_S:.0f} s"
        except LocalFault as fault:
            why = fault.line()
        else:
            self._faults.pop(key, None)
            return found
        if key not in self._faults:
            log.warning("guest.%s limits nothing while it cannot be measured: %s", key, why)
        self._faults[key] = why
        return None

    def _wait_s(self) -> float:
        """Seconds to the next look; sooner where the end of a reason is near."""
        left_s = self.left_s()
        return SAMPLE_S if left_s is None else min(SAMPLE_S, max(0.1, left_s))
