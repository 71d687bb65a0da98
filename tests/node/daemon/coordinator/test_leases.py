"""What this node knows of the others: their leases, and since when it has no connection to them."""

from types import SimpleNamespace

import pytest

from atoll.node.daemon.coordinator.leases import MemberLeases
from atoll.node.daemon.rounds.trials import Trials
from atoll.node.daemon.rounds.types import LeasesChanged
from atoll.node.daemon.snapshots.offers import SnapshotOffer
from atoll.node.runs.presets import preset
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.ledger.registers import Lease

A, B = PeerId("peer-a"), PeerId("peer-b")
SPEC = preset("tiny", Identity(bytes(32)).peer_id, 1, "synthetic:markov")
LEASE_S = SPEC.pace.lease_s


class Net:
    """Two members, whose leases begin when they are renewed, and the connections to them."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.connected = [A, B]
        self.untried: set[PeerId] = set()
        self.activity: dict[PeerId, str] = {}
        self.unreachable: set[PeerId] = set()
        self.began = {A: self.now, B: self.now}
        self.published: list[str] = []

    def leases(self):
        lease = lambda peer: Lease(self.activity.get(peer, "training"), Round(3), Round(2), b"", Round(-1), 10.0)  # noqa: E731
        return {peer: (lease(peer), LEASE_S - (self.now - at)) for peer, at in self.began.items()}

    def neighbours(self):
        return self.connected

    def is_unreachable(self, peer):
        return peer in self.unreachable

    def put_lease(self, lease, lease_s):
        self.published.append(lease.activity)

    def is_tried(self, peer):
        return peer not in self.untried


class World:
    """Reads the leases every half second, as the driver does."""

    def __init__(self) -> None:
        self.net = Net()
        self.told: list[LeasesChanged] = []
        self.excluded: dict[PeerId, int] = {}
        self.refusal = ""
        context = SimpleNamespace(now=lambda: self.net.now, spec=SPEC, name="otter")
        self.leases = MemberLeases(
            context=context, net=self.net,
            assignment=SimpleNamespace(shortage=lambda members: "", publish=lambda: None),
            feed_round=self.told.append, offer=lambda: None, applied=lambda: Round(2), tokens_per_s=lambda: 1.0,
            loss=lambda: 2.5, round_s=lambda: 3.0, refused=lambda: self.refusal,
            is_excluded=lambda peer, number: number >= self.excluded.get(peer, number + 1),
            trials=Trials(lambda peer: peer),
        )  # fmt: skip
        self.leases.refresh()

    def later(self, seconds: float) -> dict[PeerId, float | None]:
        end = self.net.now + seconds
        while self.net.now < end:
            self.net.now += 0.5
            self.leases.refresh()
        return {peer: view.lost_at for peer, view in self.leases.members.items()}


@pytest.fixture
def world() -> World:
    return World()


def test_the_loss_of_a_connection_is_told_once_with_its_time(world):
    assert world.later(5.0) == {A: None, B: None}
    assert len(world.told) == 1
    world.net.connected = [B]
    assert world.later(5.0) == {A: 1005.5, B: None}
    assert len(world.told) == 2


def test_only_a_lost_member_is_unreachable_and_all_say_how_long_a_round_takes(world):
    world.net.unreachable = {A, B}
    world.net.connected = [B]
    world.later(0.5)
    assert {peer: view.is_unreachable for peer, view in world.leases.members.items()} == {A: True, B: False}
    assert {view.round_s for view in world.leases.members.values()} == {
        SPEC.steps(3) * SPEC.inner.batch * SPEC.model.context / 10.0
    }


def test_a_connection_that_is_back_is_not_lost(world):
    world.net.connected = [B]
    world.later(5.0)
    world.net.connected = [A, B]
    assert world.later(0.5) == {A: None, B: None}
    world.net.connected = [B]
    assert world.later(0.5)[A] == 1006.0


def test_a_member_that_was_never_connected_is_not_lost():
    world = World()
    world.net.connected = [A]
    world.leases._connected.clear()
    assert world.later(5.0) == {A: None, B: None}


def test_a_lease_that_comes_through_others_says_that_the_member_lives(world):
    world.net.connected = [B]
    assert world.later(10.0)[A] is not None
    world.net.began[A] = world.net.now
    assert world.later(0.5) == {A: None, B: None}


def test_the_last_lease_before_a_loss_is_no_sign_of_life(world):
    """Times of leases are rounded to eighths of a second: one from just before looks like one from after."""
    world.net.now += 0.1
    world.net.began[A] = world.net.now
    world.net.connected = [B]
    world.leases.refresh()
    assert world.leases.members[A].heard > world.net.now
    assert world.later(3.0)[A] is not None


def test_who_has_no_lease_any_more_is_forgotten(world):
    world.net.connected = [B]
    world.later(5.0)
    del world.net.began[A]
    assert world.later(0.5) == {B: None}
    assert world.leases._lost_at == {}


def test_nobody_waits_for_the_lease_of_a_member_that_left(world):
    world.leases.on_entry(A, is_leave=True)
    assert world.later(0.5) == {B: None}
    assert set(world.told[-1].members) == {B}


def test_a_member_that_left_and_is_back_counts_again(world):
    world.leases.on_entry(A, is_leave=True)
    assert world.later(5.0) == {B: None}
    world.net.began[A] = world.net.now
    assert world.later(0.5) == {A: None, B: None}
    assert world.leases.left_at == {}


def test_a_lease_that_a_leaver_renews_is_no_return(world):
    """It serves what others lack until it ends; the lease lives for as long as any other."""
    world.leases.on_entry(A, is_leave=True)
    world.later(5.0)
    world.net.began[A], world.net.activity[A] = world.net.now, "leaving"
    assert world.later(0.5) == {B: None}
    assert set(world.leases.left_at) == {A}
    assert world.later(5.0) == {B: None}
    world.net.began[A], world.net.activity[A] = world.net.now, "syncing"
    assert world.later(0.5) == {A: None, B: None}


def test_a_leave_that_is_read_after_the_return_is_over_with_the_next_entry(world):
    world.leases.on_entry(A, is_leave=True)
    world.leases.on_entry(A, is_leave=False)
    assert world.later(0.5) == {A: None, B: None}


def test_a_leaver_that_returns_is_here_with_its_new_lease_though_an_entry_came_before_it(world):
    """Gossip of the lease may be lost, and the ledger comes first: the old lease is read once more."""
    world.net.activity[A] = "leaving"
    assert world.later(5.0) == {B: None}
    world.net.now += 4.0
    world.net.began[A] = world.net.now
    old = world.net.began | {A: world.net.now - 4.0}
    world.net.began, new = old, world.net.began
    world.leases.on_entry(A, is_leave=False)
    assert world.later(0.5) == {B: None}, "by the lease that is here it still leaves"
    world.net.began, world.net.activity = new, {}
    assert world.later(0.5) == {A: None, B: None}


def test_of_a_crowd_without_work_a_few_connected_ones_are_waited_for(world):
    crowd = [PeerId(f"eve-{number}") for number in range(50)]
    world.net.untried = {*crowd}
    world.net.began |= dict.fromkeys(crowd, world.net.now)
    world.net.connected = [A, B, crowd[7]]
    members = world.later(1.0)
    assert set(members) == {A, B, crowd[7]}
    assert [world.leases.members[peer].untried for peer in (A, crowd[7])] == [False, True]


def test_no_round_waits_for_an_excluded_member_from_its_round_on():
    world = World()
    world.excluded[A] = 2
    assert set(world.later(1.0)) == {A, B}, "this node is in round 0"
    world.leases._round = Round(2)
    assert set(world.later(1.0)) == {B}


@pytest.mark.parametrize("activity", ["observing", "leaving"])
def test_who_only_observes_takes_no_place_in_a_trial(world, activity):
    """So that evaluators and relays, which never show work, keep no newcomer that trains from being waited for."""
    observers = [PeerId(f"observer-{number}") for number in range(40)]
    world.net.began = dict.fromkeys([*observers, A, B], world.net.now)
    world.net.untried = {*observers, B}
    world.net.connected = [*observers, A, B]
    world.net.activity = dict.fromkeys(observers, activity)
    world.later(1.0)
    assert world.leases.members[B].untried
    assert [peer for peer, view in world.leases.members.items() if view.untried] == [B]


class Published(World):
    """Also publishes its own lease; `snapshot` is what it offers."""

    def __init__(self) -> None:
        super().__init__()
        self.put: list[Lease] = []
        self.snapshot: SnapshotOffer | None = None
        self.net.put_lease = lambda lease, ttl_s: self.put.append(lease)
        self.leases.assignment.publish = lambda: None
        self.leases.offer = lambda: self.snapshot
        self.leases.announce("training", Round(3))


@pytest.mark.parametrize(("activity", "announced"), [("observing", [-1, 2]), ("training", [-1])])
def test_a_node_at_rest_announces_a_new_snapshot_at_once(activity, announced):
    """A member that leaves waits until another one offers the model. A lease of training says when that began."""
    world = Published()
    world.leases.announce(activity, Round(3))
    world.put = world.put[-1:]
    world.snapshot = SnapshotOffer(PeerId("me"), Digest(bytes(32)), Round(2))
    for _ in range(3):
        world.leases.publish_if_due()
    assert [lease.snapshot_round for lease in world.put] == announced


def test_a_lease_has_the_name_that_the_operator_chose():
    assert [lease.name for lease in Published().put] == ["otter"]


def test_who_left_renews_its_lease_as_one_that_works_on_nothing():
    world = Published()
    world.leases.leave()
    world.leases.publish_if_due()
    assert [lease.activity for lease in world.put] == ["training"], "its Leave says the rest"
    world.net.now += LEASE_S / 2
    world.leases.publish_if_due()
    assert [lease.activity for lease in world.put] == ["training", "leaving"]


def test_a_node_whose_disk_refuses_its_work_says_at_once_that_no_round_need_wait_for_it(world):
    world.leases.announce("training", Round(3))
    world.refusal = "state: No space left on device"
    world.leases.publish_if_due()
    world.leases.publish_if_due()
    world.refusal = ""
    world.leases.publish_if_due()
    world.leases.publish_if_due()
    assert world.net.published == ["training", "paused", "training"]


@pytest.mark.parametrize("can_vote", [True, False])
def test_a_node_that_can_write_no_vote_lets_its_lease_end_and_is_back_at_once(world, can_vote):
    """With two such of three the third would have no final round for as long. A refused snapshot is no reason."""
    world.leases.announce("training", Round(3))
    world.refusal = "state: No space left on device"
    for _ in range(9):
        world.leases.publish_if_due(can_vote=can_vote)
        world.net.now += LEASE_S / 2
    assert len(world.net.published) > 8 if can_vote else world.net.published == ["training", "paused"]
    world.refusal = ""
    world.leases.publish_if_due()
    assert world.net.published[-1] == "training"


def test_a_full_disk_changes_no_other_activity(world):
    world.refusal = "state: No space left on device"
    for activity in ("syncing", "observing", "done"):
        world.leases.announce(activity, Round(3))
    assert world.net.published == ["syncing", "observing", "done"]
