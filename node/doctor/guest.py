"""Checks that the limits of a guest can be measured on this machine, and says what follows from them now."""

import asyncio
from collections.abc import Iterator

from atoll.node.config.guest import read_guest
from atoll.node.doctor.checks import DoctorCheck, DoctorInput, Finding
from atoll.node.guest.sensors import MachineFiles, MachineSensors, check_sensors
from atoll.node.guest.watch import READ_S, GuestWatch


def guest(given: DoctorInput) -> Iterator[Finding]:
    """Read each sensor that `[guest]` needs once; nothing without such limits. Raises ConfigError."""
    limits = read_guest(given.config.guest) if given.config else None
    if limits is None or not limits.limits_anything:
        return
    files = MachineFiles()
    check_sensors(limits, files)
    watch = GuestWatch(limits, MachineSensors(files), hold=lambda reason: None)
    asyncio.run(watch.sample())
    if watch.trouble:
        yield Finding("guest", "warn", watch.trouble, "the node trains as if that limit were not set")
    yield Finding("guest", "pass", watch.verdict.reason or "the node may train now")


CHECKS = (DoctorCheck("guest", 3 * READ_S + 5.0, guest),)
