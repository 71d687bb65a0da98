"""When relayed connections are tried again: soon at first, ever more rarely, and not at all in the grace."""

import random

from hypothesis import given
from hypothesis import strategies as st

from atoll.p2p.nat.circuit_upgrades import FIRST_S, GRACE_S, MAX_S, UpgradeSchedule
from atoll.protocols.ids import PeerId

A = PeerId("a")


@given(st.integers(0, 1000), st.integers(1, 12))
def test_pauses_grow_up_to_a_cap(seed, tries):
    upgrades, now = UpgradeSchedule(random.Random(seed)), 100.0
    upgrades.on_held(A, now)
    assert not upgrades.is_due(A, now + 0.79 * FIRST_S)
    assert upgrades.is_due(A, now + 1.21 * FIRST_S)
    for count in range(1, tries + 1):
        upgrades.postpone(A, now)
        pause_s = min(MAX_S, FIRST_S * 3**count)
        assert not upgrades.is_due(A, now + 0.79 * pause_s)
        assert upgrades.is_due(A, now + 1.21 * pause_s)


def test_a_replaced_connection_has_its_grace_and_starts_afresh():
    upgrades = UpgradeSchedule(random.Random(1))
    upgrades.on_held(A, 0.0)
    for _ in range(9):
        upgrades.postpone(A, 0.0)
    upgrades.on_replaced(A, 10.0)
    assert not upgrades.is_due(A, 9.9 + GRACE_S)
    assert upgrades.is_due(A, 10.0 + GRACE_S)
    upgrades.postpone(A, 50.0)
    assert upgrades.is_due(A, 50.0 + 1.21 * 3 * FIRST_S)
