"""A node leaves its chain: what a disk that refuses in the middle leaves behind."""

import pytest

from atoll.node.daemon.consensus.chains.chain_exit import ChainExit
from atoll.node.ipc.chain_mark import ChainMark
from atoll.p2p.system.disk_reports import DISK_RETRY_S
from atoll.protocols.errors import DiskFault
from atoll.protocols.ids import Round, digest
from atoll.protocols.ledger.records import Follow

CHOICE = Follow(digest(b"epoch"), Round(7))


class Guard:
    """A disk that takes marks; its ledger refuses so often."""

    def __init__(self, refusals):
        self.refusals, self.published = refusals, []

    def does(self, work):
        try:
            work()
        except DiskFault:
            return False
        return True

    def publish(self, body):
        if self.refusals:
            self.refusals -= 1
            return None
        self.published.append(body)
        return body

    def on_disk_success(self):
        pass


def way_out(folder, guard, clock):
    return ChainExit(
        guard=guard,
        now=lambda: clock[0],
        event=lambda **facts: None,
        mark=ChainMark(folder),
    )


@pytest.mark.parametrize("before", [None, 3])
def test_a_mark_does_not_stay_while_the_ledger_refuses(tmp_path, before):
    """A worker that starts meanwhile would drop the only model that this node has."""
    if before is not None:
        ChainMark(tmp_path).put(before)
    guard, clock = Guard(2), [0.0]
    left = way_out(tmp_path, guard, clock)
    for _ in range(2):
        assert not left.leave(Round(7), CHOICE)
        assert ChainMark(tmp_path).first() == before
        clock[0] += DISK_RETRY_S
    assert left.leave(Round(7), CHOICE)
    assert guard.published == [CHOICE]
    assert ChainMark(tmp_path).first() == (7 if before is None else 3)


def test_another_chain_that_parts_earlier_lowers_the_mark_of_a_node_that_leaves(tmp_path):
    """Between its choice and its next life: rounds before the first mark are of the chain that it left, too."""
    told = []
    left = way_out(tmp_path, Guard(0), [0.0])
    left.event = lambda **facts: told.append(facts["round"])
    assert left.leave(Round(7), CHOICE)
    for first in (9, 5, 6, 5):
        assert not left.leave(Round(first)), "it begins again once"
    assert ChainMark(tmp_path).first() == 5
    assert told == [7, 5]
