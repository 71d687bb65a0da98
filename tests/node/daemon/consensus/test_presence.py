"""Voters that live and take no part: when the others go on without them, and when not."""

from msgspec.structs import replace

from atoll.node.daemon.consensus.standstill import Standstill
from atoll.node.daemon.consensus.types import Idle, MembersSeen
from atoll.node.daemon.consensus.voter import may_append
from atoll.node.daemon.standing_still.absent_members import missing
from atoll.protocols.ids import PeerId, Round, digest
from atoll.protocols.ledger.records import Ballot, Prepare, Promise, Proposal, Vote, epoch_id
from tests.node.daemon.consensus.test_epochs import LEASE, PATIENCE, A, B, C, D, Node, epoch

E, F, G = (PeerId(f"peer-{name}") for name in "efg")
AT = Round(5)
LONGEST = 300
"""Seconds after which a ballot of one owner among four is due."""


def three_of_four(here=(A, B, C)):
    """A node that waits for the round to become final: D is gone, so A, B and C are just a quorum."""
    node = Node(voters=(A, B, C, D), here=here)
    return node.feed(Idle(idle=True, now=node.now))


def ballot(attempt):
    return Ballot(attempt, (A, B, C, D)[attempt % 4], b"")


def hold(node, *attempts, promised=(B,)):
    """Ballots of these attempts, one after the other, each until it counts: then the one before it is over.

    A answers each by itself.
    """
    for attempt in attempts:
        node.say(ballot(attempt).proposer, Prepare(AT, ballot(attempt)))
        count_down = LONGEST
        while node.state.attempt < attempt:
            node.wait(1)
            count_down -= 1
            assert count_down, f"attempt {attempt} is never due"
        for peer in promised:
            node.say(peer, Promise(AT, ballot(attempt), ()))
    return node


def test_who_promises_nothing_for_a_lease_and_two_ballots_is_left_out():
    node = hold(three_of_four(), 1, 5)
    assert not node.signed(), "C missed one ballot that is over"
    assert not missing(node.state)
    hold(node, 9)
    assert node.signed() == [epoch(A, B)]
    assert "…peer-c keeps back its votes" in missing(node.state)
    assert node.say(B, epoch(A, B)).entered() == [epoch_id(epoch(A, B))]


def test_who_promises_and_does_not_vote_is_left_out():
    node = three_of_four()
    for attempt in (1, 5, 9):
        hold(node, attempt, promised=(B, C))
        name = digest(attempt.to_bytes(1, "big"))
        node.say(B, Proposal(AT, ballot(attempt), (digest(b"work"),), digest(b"state")))
        for peer in (A, B):
            node.say(peer, Vote(AT, ballot(attempt), name))
    assert node.signed() == [epoch(A, B)]


def test_who_takes_part_in_one_of_two_ballots_is_waited_for_until_four_decided_nothing():
    node = three_of_four()
    hold(node, 1, promised=(B, C))
    hold(node, 5)
    hold(node, 9, promised=(B, C))
    hold(node, 13)
    assert not node.signed(), "the fourth is not over"
    assert hold(node, 17).signed() == [epoch(A, B)]


def test_a_promise_after_its_turn_changes_nothing():
    node = hold(three_of_four(), 1, 5)
    node.say(C, Promise(AT, ballot(1), ()))
    hold(node, 9)
    node.say(C, Promise(AT, ballot(5), ()))
    assert node.wait(1).signed() == [epoch(A, B)]


def test_the_wait_begins_when_a_quorum_is_here_again():
    """Who came back just now could take part in no ballot before."""
    node = hold(three_of_four(), 1, 5)
    node.feed(MembersSeen(frozenset({A, B}))).wait(1).feed(MembersSeen(frozenset({A, B, C})))
    assert not hold(node, 9).signed()
    assert hold(node, 13).signed()


def test_it_gives_up_where_the_others_found_nothing_and_looks_again():
    node = hold(three_of_four(), 1, 5, 9).wait(PATIENCE + 1)
    assert (node.signed(), node.followed()) == ([epoch(A, B)], [b""])
    assert not hold(node, 13).signed()[1:]
    assert hold(node, 17).signed() == [epoch(A, B)] * 2


def test_where_voters_are_gone_it_gives_up_for_an_epoch_with_all_that_are_here():
    """B came up since, and saw no ballot in which C kept back its vote."""
    node = Node(voters=(A, B, C, D, PeerId("peer-e")), here=(A, B, C))
    node.feed(Idle(idle=True, now=node.now))
    node.state = replace(node.state, took_part=(frozenset({A, B}), frozenset({A, B})))
    assert node.wait(LEASE + 1).signed() == [epoch(A, B)]
    node.say(B, epoch(A, B, C)).say(C, epoch(A, B, C))
    assert not node.wait(PATIENCE - 2).signed()[1:]
    assert node.wait(3).signed()[1:] == [epoch(A, B, C)]
    assert node.entered() == [epoch_id(epoch(A, B, C))]


def test_it_enters_what_it_gave_up_once_all_signed():
    """B may have signed because A had."""
    node = hold(three_of_four(here=(A, B, C)), 1, 5, 9).wait(PATIENCE + 1)
    assert node.followed() == [b""]
    node.feed(MembersSeen(frozenset({A, B, C, D}))).say(B, epoch(A, B))
    assert node.entered() == [epoch_id(epoch(A, B))]
    assert node.followed() == [b"", epoch_id(epoch(A, B))]


def test_the_signature_of_another_saves_the_wait_of_a_lease():
    node = three_of_four()
    node.state = replace(node.state, took_part=(frozenset({A, B}), frozenset({A, B})))
    node.wait(1).feed(MembersSeen(frozenset({A, B, C})))
    assert not node.signed()
    assert node.say(B, epoch(A, B)).signed() == [epoch(A, B)]


def five_of_seven(*took_part):
    """A node that saw these ballots: E took part in none. F and G are gone, so the five are just a quorum."""
    node = Node(voters=(A, B, C, D, E, F, G), here=(A, B, C, D, E))
    node.feed(Idle(idle=True, now=node.now)).wait(1)
    node.state = replace(node.state, took_part=took_part)
    return node


def test_one_ballot_is_enough_once_most_signed_an_epoch():
    """They give up after a patience: a second ballot may come later."""
    node = five_of_seven(frozenset({A, B, C, D})).say(B, epoch(A, B, C, D)).say(C, epoch(A, B, C, D))
    assert not node.signed(), "two of five are not most"
    assert node.say(D, epoch(A, B, C, D)).signed() == [epoch(A, B, C, D)]
    assert node.entered() == [epoch_id(epoch(A, B, C, D))]


def test_who_signed_still_promises_so_that_others_see_who_does_not():
    """A vote would be one in two epochs. A promise only says that no lower ballot gets a vote."""
    node = hold(three_of_four(), 1, 5, 9)
    assert node.signed() == [epoch(A, B)]
    node.say(ballot(13).proposer, Prepare(AT, ballot(13)))
    for peer in (B, C):
        node.say(peer, Promise(AT, ballot(13), ()))
    assert node.state.book.promised_by((A,), ballot(13)), "more than a third found that it counts"
    assert not may_append(node.state)
    node.say(B, epoch(A, B), Prepare(AT, ballot(17)))
    for peer in (C, D):
        node.say(peer, Promise(AT, ballot(17), ()))
    assert node.entered()
    assert not node.state.books[5].promised_by((A,), ballot(17)), "it began"


def test_one_ballot_is_not_enough_where_most_signed_an_epoch_with_the_voter():
    node = five_of_seven(frozenset({A, B, C, D}))
    for peer in (B, C, D):
        node.say(peer, epoch(A, B, C, D, E))
    assert not node.signed()


def test_who_took_part_in_the_newest_ballot_is_waited_for_whatever_most_signed():
    for took_part in [(), (frozenset({A, B, C, D, E}),)]:
        node = five_of_seven(*took_part)
        for peer in (B, C, D):
            node.say(peer, epoch(A, B, C, D))
        assert not node.signed()


def test_fewer_than_half_leave_nobody_out():
    node = three_of_four(here=(A, B, C, D))
    hold(node, 1, 5, 9, 13, promised=())
    assert not node.signed(), "A alone promised"


def test_no_epoch_with_one_that_keeps_back_its_votes_is_signed():
    node = hold(three_of_four(), 1, 5).say(B, epoch(A, B, C))
    assert hold(node, 9).signed() == [epoch(A, B)]


def test_who_signs_nothing_for_a_lease_and_a_patience_is_left_out():
    node = Node(voters=(A, B, C, D), here=(A, B)).wait(LEASE + 1)
    assert node.signed() == [epoch(A, B)]
    assert not node.wait(LEASE + PATIENCE - 2).signed()[1:]
    assert node.wait(4).signed() == [epoch(A, B), epoch(A)]
    assert node.entered() == [epoch_id(epoch(A))]


def test_who_signs_one_of_its_own_instead_is_left_out_after_as_long_again():
    voters = (A, B, C, D, PeerId("peer-e"))
    node = Node(voters=voters, here=(A, B, C)).wait(LEASE + 1).say(B, epoch(A, B, C)).say(C, epoch(C, D))
    assert not node.wait(2 * (LEASE + PATIENCE) - 2).signed()[1:]
    assert node.wait(4).signed() == [epoch(A, B, C), epoch(A, B)]
    assert node.say(B, epoch(A, B)).entered() == [epoch_id(epoch(A, B))]
    alone = Node(voters=voters, here=(A, B, C)).wait(LEASE + 1).say(B, epoch(B, D)).say(C, epoch(C, D))
    assert not alone.wait(4 * (LEASE + PATIENCE)).signed()[1:], "one of three is not most of those that are here"


def test_who_was_left_out_before_is_left_out_after_one_ballot():
    node = hold(three_of_four(), 1, 5, 9).say(B, epoch(A, B))
    assert node.entered()
    assert node.state.suspects == {C}
    node = three_of_four()
    node.state = replace(node.state, suspects=frozenset({C}))
    assert not hold(node, 1).signed()
    assert hold(node, 5).signed() == [epoch(A, B)]


def test_who_takes_part_again_is_trusted_again():
    node = three_of_four()
    node.state = replace(node.state, suspects=frozenset({C}))
    hold(node, 1, promised=(B, C))
    assert not hold(node, 5, 9).signed()
    assert not node.state.suspects


ATTEMPTS = (1, 2, 3, 4, 8, 9, 10, 11, 15)
"""Of the voters that are not this node and not gone."""
HONEST = epoch(A, B, C)


def in_turns(*attempts, node=None, turns=((D,), (E,)), others=(B, C)):
    """A quorum, and ballots that D and E answer in turn. More than a third answered: they count at once."""
    node = node or five_of_seven().wait(LEASE)
    for attempt in attempts:
        at = Ballot(attempt, node.state.voters[attempt % 7], b"")
        node.say(at.proposer, Prepare(AT, at))
        for peer in (*others, *turns[ATTEMPTS.index(attempt) % len(turns)]):
            node.say(peer, Promise(AT, at, ()))
    return node


def test_liars_that_answer_in_turn_are_left_out_together():
    node = in_turns(*ATTEMPTS[:4])
    assert not node.signed(), "the fourth is not over"
    assert in_turns(8, node=node).signed() == [HONEST]
    for peer in (B, C):
        node.say(peer, HONEST)
    assert node.entered() == [epoch_id(HONEST)]
    assert node.state.still == Standstill()


def test_status_says_whose_answers_are_missing_while_ballots_decide_nothing():
    node = in_turns(*ATTEMPTS[:4])
    assert not missing(node.state), "three that decided nothing"
    in_turns(8, node=node)
    assert "…peer-d keeps back its votes, …peer-e keeps back its votes" in missing(node.state), "in a try"
    node.wait(PATIENCE)
    found = "round 5: its 4 newest ballots decided nothing: …peer-d missed 2, …peer-e missed 2"
    assert missing(node.state) == found, "between two tries"
    node = in_turns(*ATTEMPTS[:5], turns=((D, E),))
    assert missing(node.state).endswith("decided nothing: all took part in them")
    node = in_turns(*ATTEMPTS[:5], turns=((C, D), (C, E), (D, E)), others=(B,))
    assert missing(node.state).endswith("…peer-c missed 1, …peer-d missed 1, …peer-e missed 2")


def test_where_a_third_missed_a_ballot_nobody_is_left_out():
    """The network fails, and liars that answer all would be more among fewer."""
    assert not in_turns(*ATTEMPTS[:5], turns=((C, D), (C, E), (D, E)), others=(B,)).signed()


def test_who_missed_one_of_the_four_newest_ballots_is_left_out_and_who_missed_one_before_is_not():
    node = five_of_seven().wait(LEASE)
    in_turns(1, node=node, turns=((D,),))
    in_turns(2, 3, 4, node=node, turns=((D, E),))
    assert in_turns(8, node=node).signed() == [epoch(A, B, C, D)]
    node = five_of_seven().wait(LEASE)
    node.state = replace(node.state, still=Standstill(parts=(frozenset({A, B, C, D, F, G}),)))
    in_turns(*ATTEMPTS[:4], node=node, turns=((D, E),))
    assert not in_turns(8, node=node).signed()


def test_who_was_away_missed_nothing():
    """Its lease may have ended for a moment."""
    node = five_of_seven().wait(LEASE)
    in_turns(1, 2, 3, 4, 8, node=node, turns=((D, E),))
    node.feed(MembersSeen(frozenset({A, B, C, D})))
    in_turns(9, node=node, turns=((D,),))
    in_turns(10, node=node, turns=((D, E),))
    node.feed(MembersSeen(frozenset({A, B, C, D, E})))
    in_turns(11, 15, node=node, turns=((D, E),))
    assert node.state.still.tries == 2
    assert not node.state.still.blamed


def test_ballots_that_few_answered_begin_no_try():
    node = five_of_seven().wait(LEASE)
    node.state = replace(node.state, still=Standstill(parts=(frozenset({A, B, C, D, F, G}),) * 4))
    for attempt in ATTEMPTS[:5]:
        node.say(node.state.voters[attempt % 7], Prepare(AT, Ballot(attempt, node.state.voters[attempt % 7], b"")))
        while node.state.attempt < attempt:
            node.wait(1)
    assert node.state.book.promised_by((A,), Ballot(8, B, b""))
    assert not node.state.still.tries


def test_who_just_came_up_begins_no_try():
    assert not in_turns(*ATTEMPTS[:5], node=five_of_seven()).signed(), "it does not know who is here"


def test_who_tries_alone_gives_up_after_a_patience_and_tries_again():
    node = in_turns(*ATTEMPTS[:5]).say(B, HONEST)
    assert not node.wait(PATIENCE - 1).followed(), "two of five are not most"
    assert node.wait(1).followed() == [b""]
    assert not in_turns(9, 10, 11, node=node).signed()[1:]
    assert in_turns(15, node=node).signed() == [HONEST] * 2


def test_most_that_try_find_who_signs_nothing():
    in_three = (frozenset({A, B, C, D, F, G}),) * 4
    node = five_of_seven().wait(LEASE)
    node.state = replace(node.state, still=Standstill(in_three, 1, node.now, frozenset({E})))
    node.wait(1).say(B, epoch(A, B, C, D)).say(C, epoch(A, B, C, D)).wait(LEASE + PATIENCE + 1)
    assert not node.followed()
    assert node.signed() == [epoch(A, B, C, D), HONEST]


def test_a_try_ends_after_three_leases_and_patiences():
    other = epoch(A, B, C, D)
    node = in_turns(*ATTEMPTS[:5]).say(B, other).say(C, other)
    assert not node.wait(3 * (LEASE + PATIENCE) - 1).followed()
    assert node.wait(1).followed() == [b""]


def test_a_try_ends_once_no_quorum_is_here_so_that_all_sign_the_same():
    """B and C tried with others than A. Two of the three that stay are most, so no try would end soon."""
    other = epoch(A, B, C, D)
    node = in_turns(*ATTEMPTS[:5]).say(B, other).say(C, other)
    assert node.signed() == [HONEST]
    node.feed(MembersSeen(frozenset({A, B, C, D})))
    assert node.wait(PATIENCE + 1).signed()[1:] == [other]
    assert node.entered() == []


def test_a_round_that_a_quorum_without_them_can_decide_is_not_left():
    node = (
        Node(voters=(A, B, C, D, E, F, G), here=(A, B, C, D, E, F)).feed(Idle(idle=True, now=1000.0)).wait(LEASE)
    )
    in_turns(*ATTEMPTS[:5], node=node, turns=((D, E), (D, E)), others=(B, C))
    assert node.state.still.blamed == {F}
    assert not node.signed()
