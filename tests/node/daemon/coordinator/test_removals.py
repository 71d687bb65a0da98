"""What a node does about an exclusion, and when."""

from types import SimpleNamespace

import pytest

from atoll.node.daemon.coordinator.removals import Removals
from atoll.node.daemon.rounds.types import AuthorExcluded, Pause
from atoll.protocols.errors import ConfigError, LocalFault
from atoll.protocols.ids import PeerId, Round
from atoll.protocols.ledger.records import Exclude

OWNER, ME, BAD = PeerId("owner"), PeerId("me"), PeerId("peer-bad")


class Node:
    """Round 4 is trained; rounds before `deciding` are final."""

    def __init__(self, me=ME, deciding=3, is_synced=True, disk=True):
        self.round, self.told, self.cut, self.reduced, self.written = [], [], {}, [], []
        self.machines = SimpleNamespace(
            round=SimpleNamespace(round=4),
            finality=SimpleNamespace(deciding=Round(deciding), me=me, rounds=50),
            feed_round=self.round.append,
        )
        self.removals = Removals(
            context=SimpleNamespace(
                me=me,
                now=lambda: 1.0,
                spec=SimpleNamespace(owner=OWNER),
                log=SimpleNamespace(event=lambda name, **facts: self.told.append(name)),
            ),
            net=SimpleNamespace(exclude=self.cut.__setitem__),
            machines=self.machines,
            guard=SimpleNamespace(
                publish=lambda body: self.written.append(body) if not disk else self._write(body)
            ),
            reducer=SimpleNamespace(exclude=lambda peer, first: self.reduced.append((peer, first))),
            is_synced=lambda: is_synced,
        )

    def _write(self, body):
        self.written.append(body)
        return body

    def hear(self, *bodies):
        for body in bodies:
            self.removals.on_exclude(body)
        return self


def test_the_lowest_round_counts_and_a_repeat_says_nothing():
    node = Node().hear(Exclude(Round(9), BAD, "a"), Exclude(Round(7), BAD, "b"), Exclude(Round(8), BAD, "c"))
    assert [event.round for event in node.round] == [9, 7]
    assert node.reduced == [(BAD, 9), (BAD, 7)]
    assert node.removals.found == {BAD: Exclude(Round(7), BAD, "b")}
    assert [node.removals.is_excluded(BAD, at) for at in (6, 7, 8)] == [False, True, True]
    assert node.round[1] == AuthorExcluded(BAD, Round(7), 1.0)


def test_a_peer_is_cut_off_once_its_round_is_final_and_told_why():
    node = Node(deciding=7).hear(Exclude(Round(7), BAD, "noise"))
    assert not node.cut, "it may be a voter that the others need"
    node.machines.finality.deciding = Round(8)
    node.removals.step()
    assert set(node.cut) == {BAD}
    assert "from round 7 on: noise" in node.cut[BAD]


@pytest.mark.parametrize(
    ("at_work", "deciding", "pauses"), [(4, 3, False), (7, 3, True), (9, 3, True), (0, 7, True)]
)
def test_an_excluded_node_stops_at_its_round_and_does_not_resume(at_work, deciding, pauses):
    node = Node(deciding=deciding)
    node.machines.round.round = at_work
    node.hear(Exclude(Round(7), ME, "noise"))
    node.removals.step()
    assert [type(event) for event in node.round] == [Pause] * pauses
    assert node.removals.trouble == "the run's owner excluded this node from round 7 on: noise"
    assert (node.cut, node.reduced) == ({}, [])
    if pauses:
        with pytest.raises(ConfigError, match="excluded"):
            node.removals.check_resume()
    else:
        node.removals.check_resume()


@pytest.mark.parametrize(
    ("me", "peer", "first", "error"),
    [
        (ME, BAD, None, ConfigError),
        (OWNER, OWNER, None, ConfigError),
        (OWNER, BAD, Round(2), ConfigError),
        (OWNER, BAD, Round(50), ConfigError),
    ],
)
def test_what_cannot_be_excluded_is_refused(me, peer, first, error):
    node = Node(me=me)
    with pytest.raises(error):
        node.removals.exclude(peer, first, "")
    assert not node.written


def test_the_owner_excludes_from_the_oldest_round_that_is_not_final():
    node = Node(me=OWNER)
    assert node.removals.exclude(BAD, None, "noise").endswith("from round 3 on")
    assert node.written == [Exclude(Round(3), BAD, "noise")]
    node.hear(*node.written)
    assert node.removals.exclude(BAD, Round(5), "").endswith("already")
    assert len(node.written) == 1


def test_a_feed_that_was_not_compared_and_a_full_disk_take_no_exclusion():
    for node in (Node(me=OWNER, is_synced=False), Node(me=OWNER, disk=False)):
        with pytest.raises(LocalFault):
            node.removals.exclude(BAD, None, "")
