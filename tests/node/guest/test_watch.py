"""The watch on virtual time: it holds the node and lets it go, and a sensor that fails limits nothing."""

import asyncio
import logging
from datetime import datetime, timedelta

from atoll.node.config.guest import GuestConfig, GuestLimits, read_guest
from atoll.node.guest.watch import READ_S, SAMPLE_S, GuestWatch
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.errors import LocalFault


class Machine:
    """Sensors that a test sets. `fault`: what each read ends with; `hangs`: no read ever ends."""

    def __init__(self) -> None:
        self.battery, self.idle, self.heat = False, 1e6, 40
        self.fault = ""
        self.hangs = False

    async def on_battery(self) -> bool:
        await self._fail()
        return self.battery

    async def idle_s(self) -> float:
        await self._fail()
        return self.idle

    async def gpu_c(self) -> int:
        await self._fail()
        return self.heat

    async def _fail(self) -> None:
        if self.fault:
            raise LocalFault(self.fault)
        if self.hangs:
            await asyncio.get_running_loop().create_future()


def watched(config: GuestConfig, machine: Machine, begin: str = "21:00:00") -> tuple[GuestWatch, list]:
    """A watch whose local time begins then, and what it told, with the second."""
    told: list[tuple[float, str]] = []
    loop = asyncio.get_running_loop()
    watch = GuestWatch(
        read_guest(config),
        machine,
        lambda reason: told.append((round(loop.time(), 1), reason)),
        lambda: datetime.fromisoformat(f"2026-03-09T{begin}") + timedelta(seconds=loop.time()),
    )
    return watch, told


async def during(watch: GuestWatch, *seconds: float, change=lambda number: None) -> None:
    """Let the watch run; `change` is called after each of these times."""
    async with asyncio.TaskGroup() as group:
        up = asyncio.Event()
        task = group.create_task(watch.serve(up.set))
        await up.wait()
        for number, wait_s in enumerate(seconds):
            await asyncio.sleep(wait_s)
            change(number)
        task.cancel()


def test_it_rests_outside_its_hours_and_goes_on_to_the_second():
    async def story() -> None:
        watch, told = watched(GuestConfig(hours="22:00-07:00"), Machine(), "21:59:03")
        await during(watch, 10 * 3600.0)
        reason = "outside its hours (22:00 to 07:00); goes on at 22:00"
        assert told[0] == (0.0, reason)
        assert told[1] == (57.0, "")
        ended, again = told[2]
        assert again == reason
        assert 0 <= ended - (57.0 + 9 * 3600.0) <= SAMPLE_S

    run_virtual(story())


def test_the_first_verdict_is_there_before_anything_trains():
    async def story() -> None:
        watch, told = watched(GuestConfig(hours="22:00-07:00"), Machine())
        before: list[int] = []
        async with asyncio.TaskGroup() as group:
            task = group.create_task(watch.serve(lambda: before.append(len(told))))
            await asyncio.sleep(0.01)
            task.cancel()
        assert before == [1]

    run_virtual(story())


def test_each_change_is_told_once():
    async def story() -> None:
        machine = Machine()
        watch, told = watched(GuestConfig(battery="pause", idle_after="10m", gpu_most_c=80), machine)

        def change(number: int) -> None:
            machine.battery, machine.idle, machine.heat = [
                (True, 1e6, 40), (True, 3.0, 90), (False, 3.0, 90), (False, 1e6, 78), (False, 1e6, 70),
            ][number]  # fmt: skip

        await during(watch, *[100.0] * 5, change=change)
        await during(watch, 0.0)
        words = [reason.split(";")[0] for _, reason in told]
        assert words == [
            "this machine runs on battery", "somebody uses this machine", "a GPU is hotter than 80 °C", "",
        ]  # fmt: skip

    run_virtual(story())


def test_a_sensor_that_fails_or_hangs_limits_nothing_and_is_logged_once(caplog):
    async def story() -> None:
        machine = Machine()
        machine.battery = True
        watch, told = watched(GuestConfig(battery="pause"), machine)

        def change(number: int) -> None:
            machine.fault = ("the driver is gone", "", "")[number]
            machine.hangs = number == 1

        await during(watch, 25.0, 100.0, 100.0, change=change)
        assert [reason[:12] for _, reason in told] == ["this machine", ""]
        assert told[1][0] <= 25.0 + SAMPLE_S
        assert watch.trouble == f"guest.battery limits nothing: no answer in {READ_S:.0f} s"
        await during(watch, 25.0)
        assert not watch.trouble
        assert told[-1][1].startswith("this machine runs on battery")

    with caplog.at_level(logging.WARNING):
        run_virtual(story())
    assert len(caplog.records) == 1


def test_without_limits_nothing_is_read():
    async def story() -> None:
        machine = Machine()
        machine.hangs = True
        watch = GuestWatch(GuestLimits(), machine, lambda reason: None)
        up = asyncio.Event()
        async with asyncio.timeout(1.0):
            await watch.serve(up.set)
        assert up.is_set()

    run_virtual(story())
