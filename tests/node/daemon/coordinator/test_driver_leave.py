"""When a node writes that it leaves."""

from types import SimpleNamespace

import pytest

from atoll.node.daemon.coordinator.driver import Driver
from atoll.protocols.errors import LocalFault
from atoll.protocols.ids import PeerId, Round
from atoll.protocols.ledger.records import Leave

NEWEST = Round(4)


def leaves(*, newest=NEWEST, members=("peer-b",), is_synced=True, fault=None):
    """What a driver in this state publishes."""
    published = []

    def publish(body):
        if fault is not None:
            raise fault
        published.append(body)
        return body

    driver = SimpleNamespace(
        contributions=SimpleNamespace(newest_own=lambda: newest),
        leases=SimpleNamespace(members=dict.fromkeys(map(PeerId, members))),
        finalizer=SimpleNamespace(is_synced=is_synced),
        guard=SimpleNamespace(publish=publish),
    )
    assert Driver.leave(driver) == bool(published or (newest is None and members and is_synced))
    return published


def test_a_node_that_never_contributed_hands_on_what_it_has_and_writes_nothing():
    assert leaves(newest=None) == []


def test_a_member_leaves_after_its_newest_contribution():
    assert leaves() == [Leave(NEWEST)]


@pytest.mark.parametrize(
    "state",
    [
        {"newest": None},
        {"members": ()},
        {"is_synced": False},
        {"fault": LocalFault("this identity has signed two histories")},
    ],
)
def test_nothing_is_written_where_nobody_reads_it_or_the_feed_may_be_another_nodes(state):
    assert leaves(**state) == []
