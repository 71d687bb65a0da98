"""What a check of a set lacks is fetched, and told where it is here already."""

from types import SimpleNamespace

import pytest

from atoll.node.daemon.consensus.types import EntryPayloadHeld
from atoll.node.daemon.coordinator.driver import Driver
from atoll.protocols.ids import Digest, Round

HELD, LACKING = Digest(bytes([1]) * 32), Digest(bytes([2]) * 32)


class Rig:
    """A driver's parts that a check asks."""

    def __init__(self, *, is_reduced: bool) -> None:
        self.fetched: list[Digest] = []
        self.told: list[object] = []
        self.reducer = SimpleNamespace(is_reduced=lambda number: is_reduced)
        self.sets = SimpleNamespace(fetch_payloads=self.fetched.extend)
        self.contributions = SimpleNamespace(is_held=lambda entry: entry == HELD)
        self.machines = SimpleNamespace(feed_finality=self.told.append)
        self.queue = SimpleNamespace(post=lambda event: event())


@pytest.mark.parametrize(("is_reduced", "told"), [(False, [HELD]), (True, [HELD, LACKING])])
def test_a_check_that_lacks_what_is_held_is_told(is_reduced, told):
    rig = Rig(is_reduced=is_reduced)
    Driver._fetch_for_check(rig, Round(3), (HELD, LACKING))
    assert rig.told == [EntryPayloadHeld(entry) for entry in told]
    assert rig.fetched == ([] if is_reduced else [HELD, LACKING]), "its slices are fetched by the check"
