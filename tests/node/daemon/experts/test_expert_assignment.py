"""Members with unlike room share the FFN slices of a dense model, and what they have is judged by its holders."""

import pytest
from msgspec.structs import replace

from atoll.node.daemon.experts.expert_assignment import ExpertAssignment
from atoll.node.daemon.rounds.participants import MemberView
from atoll.node.runs.presets import preset
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Round
from atoll.protocols.ledger.registers import Holding
from atoll.protocols.run.experts import bitmap_of, experts_in

PEERS = [Identity(bytes([number]) * 32).peer_id for number in range(1, 5)]
SLICES = 5


class Registers:
    """What members announced, as the swarm's registers hold it."""

    def __init__(self):
        self.mine = None
        self.others = {}

    def put_holding(self, holding, ttl_s):
        assert ttl_s > 0
        self.mine = holding

    def holdings(self):
        return dict(self.others)


def spec_of(holders):
    spec = preset("tiny", PEERS[0], 1)
    model = replace(spec.model, ffn_slices=SLICES)
    found = replace(spec, model=model, outer=replace(spec.outer, holders=holders), reduce=None)
    found.check()
    return found


def experts_spec(holders):
    spec = preset("moe-smoke", PEERS[0], 1, "synthetic:markov")
    found = replace(spec, outer=replace(spec.outer, holders=holders), reduce=None)
    found.check()
    return found


def settled(spec, rooms):
    """Each member's slices once all have announced what follows from the others' announcements."""
    views = {peer: MemberView("training", Round(0), 0.0) for peer in PEERS[: len(rooms)]}
    nodes = {}
    for peer, room in zip(views, rooms, strict=True):
        net = Registers()
        nodes[peer] = (ExpertAssignment(spec, peer, net, room), net)
    for _ in range(3):
        for peer, (assignment, net) in nodes.items():
            net.others = {p: other.mine for p, (_, other) in nodes.items() if p != peer and other.mine is not None}
            assignment.assign({p: view for p, view in views.items() if p != peer})
    lines = {
        assignment.shortage({p: v for p, v in views.items() if p != peer})
        for peer, (assignment, _) in nodes.items()
    }
    return [set(assignment.trained) for assignment, _ in nodes.values()], lines


def test_strong_members_train_all_slices_beside_weak_ones_that_train_one():
    trained, lines = settled(spec_of(4), [5, 5, 1, 1])
    assert [len(each) for each in trained] == [5, 5, 1, 1]
    assert lines == {""}, "three holders of a slice are fewer than four, and nobody waits for it"


def test_weak_members_alone_cover_the_model_once():
    trained, lines = settled(spec_of(4), [2, 2, 1])
    assert sorted(one for each in trained for one in each) == list(range(SLICES))
    assert lines == {""}


def test_a_slice_that_nobody_has_room_for_is_said():
    trained, lines = settled(spec_of(4), [2, 2])
    assert len(set().union(*trained)) == 4
    assert lines == {"they have room for 4 experts; 5 with 1 holders each need 5"}


@pytest.mark.parametrize("small", [0, 2])
def test_who_has_little_room_keeps_no_run_from_beginning(small):
    spec = experts_spec(2)
    trained, lines = settled(spec, [spec.model.expert_count, small])
    assert len(trained[0]) == spec.model.expert_count
    assert lines == {""}, "without it the run would begin"


@pytest.mark.parametrize("room", [1, 3])
def test_what_is_announced_is_what_is_trained(room):
    spec, net = spec_of(1), Registers()
    assignment = ExpertAssignment(spec, PEERS[0], net, room)
    bitmap = assignment.assign({})
    assert experts_in(bitmap, SLICES) == set(assignment.trained)
    assert net.mine == Holding(bitmap, room, ())
    assert bitmap != bitmap_of(range(SLICES), SLICES)
