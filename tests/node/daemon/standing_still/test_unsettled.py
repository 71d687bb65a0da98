"""The line about what is not settled: whose vote a round waits for by its lease, and what may be decided anew."""

from types import SimpleNamespace

from msgspec.structs import replace

from atoll.node.daemon.consensus.proposer import MIN_PATIENCE_S
from atoll.node.daemon.consensus.types import FinalityTick, MembersSeen
from atoll.node.daemon.standing_still.absent_members import missing, unsettled
from atoll.node.daemon.status import DaemonOperator
from atoll.protocols.ids import Round
from atoll.protocols.ledger.records import Follow, Leave, epoch_id
from atoll.protocols.ledger.registers import Lease
from tests.node.daemon.consensus.test_epochs import LEASE, PATIENCE, A, B, C, D, Node, epoch
from tests.node.daemon.test_status import PARTS, chain_of


def lives(left_s, *peers, final=4):
    """The leases of these members, with so many seconds left."""
    lease = Lease("training", Round(5), Round(final), b"", Round(-1), 10.0)
    return lambda: dict.fromkeys(peers, (lease, left_s))


def lost(node, *peers, here=(A, B, C)):
    """The connection to these members of those that are here is lost."""
    return node.feed(MembersSeen(frozenset(here), frozenset(peers)), FinalityTick(node.now))


def test_a_round_that_waits_for_a_vote_of_one_whose_connection_is_lost_says_whose_and_until_when():
    node = lost(Node(voters=(A, B), here=(A, B)).wait(30), B, here=(A, B))
    assert not missing(node.state), "by its lease it is here"
    turn_s = PATIENCE / 4
    whose, until = "round 5 waits for the vote of …peer-b (heard 6 s ago)", f"{14 + turn_s:.0f} s"
    assert unsettled(node.state, lives(14.0, B)) == f"{whose}; the others go on without it in {until}"
    # When that time is over the others do go on.
    node.wait(14).feed(MembersSeen(frozenset({A})))
    assert missing(node.state)
    assert unsettled(node.state, dict) == ""
    assert not node.signed()
    assert node.wait(turn_s + 1).signed() == [epoch(A)]


def test_so_does_one_that_never_had_that_connection_once_a_lease_is_not_renewed():
    node = Node(voters=(A, B), here=(A, B)).wait(30)
    assert unsettled(node.state, lives(LEASE / 2 + 0.1, B)) == ""
    assert "the vote of …peer-b (heard 11 s ago)" in unsettled(node.state, lives(LEASE / 2 - 1, B))


def test_a_quorum_without_the_lost_one_waits_for_nobody():
    node = lost(Node().wait(30), C)
    assert unsettled(node.state, lives(15.0, B, C)) == ""
    both = "round 5 waits for the vote of …peer-b (heard 5 s ago), …peer-c (heard 5 s ago); "
    assert unsettled(lost(node, B, C).state, lives(15.0, B, C)).startswith(both)


def test_a_node_that_is_behind_says_nothing_of_votes_unless_the_lost_one_alone_is_ahead():
    node = lost(Node(voters=(A, B), here=(A, B, C)).wait(30), B, here=(A, B, C))
    node.state = replace(node.state, accepted=frozenset({A, B, C}))
    ahead, behind = lives(15.0, B, final=5), lives(15.0, C, final=4)
    assert unsettled(node.state, lambda: ahead() | behind()), "nobody brings that record before its lease ends"
    assert unsettled(node.state, lives(15.0, B, C, final=5)) == ""
    assert unsettled(node.state, lambda: ahead() | lives(15.0, D, final=1 << 30)()), (
        "anybody can hold a lease that says anything"
    )


def test_a_node_that_just_came_up_says_when_its_own_lease_lets_it_go_on():
    node = lost(Node(voters=(A, B), here=(A, B)).wait(2), B, here=(A, B))
    assert unsettled(node.state, lives(3.0, B)).endswith("the others go on without it in 18 s")


def test_the_line_reaches_the_status():
    node = lost(Node(voters=(A, B), here=(A, B)).wait(30), B, here=(A, B))
    standings = SimpleNamespace(
        of=lambda *peers: [None], diminished=lambda others: (), finality=lambda: node.state
    )
    parts = {
        "plan": SimpleNamespace(identity=SimpleNamespace(peer_id=A)),
        "chain": chain_of(SimpleNamespace(excluded=(), votes_against=(), standings=standings)),
        "net": SimpleNamespace(leases=lives(14.0, B)),
    }
    one = DaemonOperator(**{**dict.fromkeys(PARTS), **parts})
    assert one._standings()["unsettled"] == unsettled(node.state, lives(14.0, B)) != ""


# --- a chain that a return may undo ---------------------------------------------------------------


def test_rounds_that_a_survivor_on_probation_decides_alone_may_be_decided_anew_until_the_only_voter_follows():
    node = Node(me=D, voters=(A,), here=(D,)).wait(LEASE - 1)
    assert unsettled(node.state) == ""
    name, away_s = epoch_id(epoch(D)), LEASE + 2 * MIN_PATIENCE_S
    assert node.wait(PATIENCE).entered() == [name]
    assert unsettled(node.state) == (
        "rounds since 5 were decided without …peer-a, and may be decided anew if it comes back after less than "
        f"{away_s:.0f} s, or was only cut off; this node's work on them then returns to its error feedback"
    )
    assert unsettled(node.say(A, Follow(Round(5), name)).state) == "", "it goes on from there"


def test_so_may_those_of_fewer_voters_than_are_gone_and_not_those_of_as_many():
    node = Node(voters=(A, B, C), here=(A,)).wait(LEASE + PATIENCE)
    assert "without …peer-b, …peer-c, and may be decided anew if they come back after" in unsettled(node.state)
    node = Node(voters=(A, B), here=(A,)).wait(LEASE + PATIENCE)
    assert node.entered()
    assert unsettled(node.state) == ""


def test_who_left_in_good_order_undoes_nothing():
    node = Node(me=D, voters=(A,), here=(D,)).say(A, Leave(Round(5)))
    assert node.entered() == [epoch_id(epoch(D))]
    assert unsettled(node.state) == ""
