"""Which payloads of old rounds a node that comes late does not fetch yet."""

from types import SimpleNamespace

import pytest

from atoll.node.daemon.assets.later_payloads import LaterPayloads
from atoll.node.daemon.coordinator.finalizer import SNAPSHOT_EVERY

LEASE_S = 60.0


class Late:
    """A node that began at 100 s, with what it knows."""

    def __init__(self, newest=-1, applied=-1, leases=()):
        self.now, self.newest, self.applied = 100.0, newest, applied
        self.leases = {number: (SimpleNamespace(final=final), 9.0) for number, final in enumerate(leases)}
        spec = SimpleNamespace(pace=SimpleNamespace(lease_s=LEASE_S))
        self.rule = LaterPayloads(
            context=SimpleNamespace(now=lambda: self.now, spec=spec),
            leases=lambda: self.leases,
            newest=lambda: self.newest,
            applied=lambda: self.applied,
        )

    def waiting(self, last=110):
        """The rounds whose payloads wait."""
        return [number for number in range(last) if self.rule(number)]


def test_final_rounds_wait_but_for_the_next_to_apply():
    """A snapshot stands for them. Without one they are applied in turn, so the next one never waits."""
    late = Late(newest=100)
    assert late.waiting() == [*range(1, 101)]
    late.applied = 40
    assert [number for number in late.waiting() if number > 40] == [*range(42, 101)]


@pytest.mark.parametrize("behind", range(SNAPSHOT_EVERY + 2))
def test_who_is_near_fetches_all_at_once(behind):
    assert Late(newest=100, applied=100 - behind).waiting() == []


def test_what_most_others_call_final_waits_for_one_lease_and_no_longer():
    late = Late(leases=(100, 100, 7, 100))
    assert late.waiting() == [*range(1, 101)]
    late.now += LEASE_S
    assert late.waiting() == [], "they lied: the rounds are open here"


def test_a_minority_of_lies_or_nobody_delays_nothing():
    assert Late(leases=(10**9, 10**9, -1, -1, 3)).waiting() == []
    assert Late().waiting() == []
