"""A round of a member whose work counts in a later one: it trains on while the others go on, and loses no turn."""

from msgspec.structs import replace

from atoll.node.daemon.rounds.state import Phase
from atoll.node.daemon.rounds.types import (
    Announce,
    Discard,
    FoldRound,
    LeaveRound,
    RoundFinal,
    RoundTick,
    StartTraining,
    TrainingDone,
    TrainingSaved,
    trained_of,
)
from atoll.protocols.ids import Round
from atoll.protocols.local.worker_messages import TrainReply
from tests.node.daemon.rounds.test_round import ME, TRAIN_S, A, B, Node, begins, entry_of, pending_of

MOST = 8


def old_work(number, age):
    return replace(pending_of(number), form=bytes([age]))


def behind(final=-1):
    """In round 0, while the others left round 1; rounds up to `final` are final."""
    node = Node(quorum_256=64, grace_256=0, most_age=MOST).ready().leases(a=0, b=0)
    for number in (0, 1):
        for who in (A, B):
            node.seen(who, number)
        node.leases(a=number + 1, b=number + 1)
    for number in range(final + 1):
        node.feed(RoundFinal(Round(number), node.now))
    return node


def done(node, pending):
    reply = TrainReply(pending, 100, 4 * TRAIN_S, 0, 0.0)
    return node.feed(trained_of(reply, -1, node.now, 0))


def test_it_trains_on_and_folds_nothing_while_the_others_go_on():
    node = behind()
    assert (node.state.phase, node.state.round) == (Phase.TRAIN, 0)
    node.feed(RoundFinal(Round(0), node.now)).feed(RoundFinal(Round(1), node.now))
    assert (node.state.phase, node.state.round, node.state.leased) == (Phase.TRAIN, 0, ("training", 0))
    assert not [each for each in node.log if isinstance(each, FoldRound)]


def test_finality_hears_of_each_round_that_the_others_left_once_and_of_what_grows():
    node = behind()
    names = [tuple(sorted(entry_of(who, number) for who in (A, B))) for number in (0, 1)]
    left = [each for each in node.log if isinstance(each, LeaveRound)]
    assert left[-1] == LeaveRound(Round(1), names[1])
    assert LeaveRound(Round(0), names[0]) in left
    assert len(set(left)) == len(left)
    assert not node.feed(RoundTick(node.now)).find(LeaveRound)
    node.feed(RoundFinal(Round(1), node.now))
    assert node.state.left == {}
    quiet = Node(quorum_256=64, grace_256=0).ready().leases(a=0).seen(A, 0).leases(a=1)
    assert not [each for each in quiet.log if isinstance(each, LeaveRound)], "other runs"


def test_its_work_is_announced_in_the_round_that_it_counts_in_and_collected_there():
    node = behind(final=1)
    pending = old_work(2, 2)
    done(node, pending)
    assert (node.state.phase, node.state.round, node.state.collecting) == (Phase.COLLECT, 2, 2)
    node.feed(TrainingSaved(pending, node.now))
    assert node.find(Announce) == [Announce(pending)]
    node.seen(ME, 2).fold()
    assert [each.round for each in node.log if isinstance(each, StartTraining)] == [0, 3]


def test_work_that_no_round_may_take_any_more_is_discarded():
    node = behind(final=1)
    late = old_work(1, 1)
    done(node, late)
    assert node.state.phase is not Phase.COLLECT
    node.feed(TrainingSaved(late, node.now))
    assert node.find(Discard) == [Discard(late)]


def test_who_comes_up_in_the_middle_of_a_round_begins_at_once():
    assert begins(0.3 * TRAIN_S) is Phase.JOIN
    assert begins(0.3 * TRAIN_S, most_age=MOST) is Phase.TRAIN


def test_other_work_is_of_the_round_that_was_asked_for():
    assert trained_of(TrainReply(pending_of(3), 1, 1.0, 0, 0.0), -1, 0.0, 0) == TrainingDone(
        Round(3), pending_of(3), 1.0, 0.0
    )
