"""The long tests first: what starts whole swarms comes before the rest. No example of a law has a deadline.

The workers of `make test` take one test or group after the other. With the long ones first, thousands of short
ones are left to fill the end of each worker; with the long ones last, one worker would be idle for minutes.
"""

import os
import signal

import pytest
from hypothesis import HealthCheck, settings

# Before torch is loaded, and for the processes that tests start: threads that wait for others' parts of a small
# array spin, and all take twice the time of one, more on a busy machine. Who needs more asks torch for them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("atoll", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("atoll")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell without job control starts `make test &` like that, and every node of a test would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Groups run on one worker, whole; pytest-xdist hands out in this order.
    long = ("swarm", "xdist_group")
    items.sort(key=lambda item: not any(item.get_closest_marker(mark) for mark in long))
