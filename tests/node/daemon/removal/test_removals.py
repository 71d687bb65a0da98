"""What a node does about an exclusion, and when."""

from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from atoll.node.daemon.consensus.chains.epochs import MAX_VOTES, Electorate, EpochBook, Segment
from atoll.node.daemon.consensus.types import CorrectionsHeld, Excision, FinalityState
from atoll.node.daemon.removal.removals import Removals
from atoll.node.daemon.removal.requests import SHOWN, votes_against
from atoll.node.daemon.rounds.state import Phase
from atoll.node.daemon.rounds.types import AuthorExcluded, Pause
from atoll.protocols.errors import ConfigError, LocalFault
from atoll.protocols.ids import PeerId, Round, RunId, digest
from atoll.protocols.ledger.probation import Tally
from atoll.protocols.ledger.records import Epoch, Excise, Exclude, epoch_id
from atoll.protocols.local.standing import Exclusion, VotesAgainst

OWNER, ME, BAD, OTHER = PeerId("owner"), PeerId("me"), PeerId("peer-bad"), PeerId("other")
RUN = RunId(digest(b"removals"))


class Node:
    """Round 4 is trained; rounds before `deciding` are final."""

    def __init__(self, me=ME, deciding=3, is_synced=True, disk=True):
        self.round, self.told, self.cut, self.reduced, self.written = [], [], {}, [], []
        self.asked, self.has_payloads, self.finality = [], True, []
        self.machines = SimpleNamespace(
            round=SimpleNamespace(round=4, phase=Phase.TRAIN),
            finality=FinalityState(
                run=RUN,
                me=me,
                rounds=50,
                last_final=deciding - 1,
                voters=(OWNER, ME, BAD, OTHER),
                epochs=EpochBook(owner=OWNER),
            ),
            feed_round=self.round.append,
            feed_finality=self.finality.append,
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
            apart=SimpleNamespace(step=lambda: None),
            are_correctable=lambda found, until: self.asked.append(found) or self.has_payloads,
        )

    def _write(self, body):
        self.written.append(body)
        return body

    def hear(self, *bodies, by=OWNER):
        for body in bodies:
            self.removals.on_exclude(by, body)
        return self

    def decide(self, number):
        self.machines.finality = replace(self.machines.finality, last_final=number - 1)
        self.removals.step()

    def know(self, **facts):
        """What the finality machine has found in the ledger."""
        self.machines.finality = replace(
            self.machines.finality, epochs=replace(self.machines.finality.epochs, **facts)
        )
        return self


def test_the_lowest_round_counts_and_a_repeat_says_nothing():
    node = Node().hear(Exclude(Round(9), BAD, "a"), Exclude(Round(7), BAD, "b"), Exclude(Round(8), BAD, "c"))
    assert [event.round for event in node.round] == [9, 7]
    assert node.reduced == [(BAD, 9), (BAD, 7)]
    assert node.removals.found == {BAD: Exclusion(peer=BAD, round=7, reason="b", by="owner")}
    assert [node.removals.is_excluded(BAD, at) for at in (6, 7, 8)] == [False, True, True]
    assert node.round[1] == AuthorExcluded(BAD, Round(7), 1.0)


def test_a_peer_is_cut_off_once_its_round_is_final_and_told_why():
    node = Node(deciding=7).hear(Exclude(Round(7), BAD, "noise"))
    assert not node.cut, "it may be a voter that the others need"
    node.decide(8)
    assert set(node.cut) == {BAD}
    assert "from round 7 on: noise" in node.cut[BAD]


@pytest.mark.parametrize("phase", [Phase.SYNC, Phase.CATCH_UP])
def test_a_node_without_the_model_cuts_nobody_off_before_it_has_it(phase):
    node = Node(deciding=9)
    node.machines.round.phase = phase
    node.hear(Exclude(Round(7), BAD, "noise"))
    assert not node.cut
    node.machines.round.phase = Phase.JOIN
    node.removals.step()
    assert set(node.cut) == {BAD}


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
        (ME, ME, None, ConfigError),
        (ME, OWNER, None, ConfigError),
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


# --- without the owner ------------------------------------------------------------------------------


def test_a_vote_alone_excludes_nobody_and_what_votes_decide_is_done_once():
    stranger = PeerId("a-stranger")
    node = Node().know(votes_against={OTHER: {BAD: 3}, stranger: {BAD: 3}})
    node.hear(Exclude(Round(3), BAD, "no voter of that round"), by=stranger)
    node.hear(Exclude(Round(3), BAD, "noise"), by=OTHER).hear(Exclude(Round(3), ME, "a vote too many"), by=OTHER)
    assert {*node.removals._reasons} == {(BAD, OTHER), (BAD, stranger)}, "only of votes that count"
    assert not node.removals.found
    assert not node.round
    node.know(voted_out={BAD: 7}).decide(7)
    assert node.removals.found == {BAD: Exclusion(peer=BAD, round=7, reason="noise", by="voters")}
    assert node.round == [AuthorExcluded(BAD, Round(7), 1.0)]
    assert not node.cut
    node.decide(8)
    node.decide(9)
    assert node.told == ["excluded"]
    assert "two thirds of the voters excluded" in node.cut[BAD]
    assert "from round 7 on: noise" in node.cut[BAD]


def test_of_the_owner_and_the_voters_the_lower_round_counts():
    node = Node().know(voted_out={BAD: 7}).hear(Exclude(Round(9), BAD, ""))
    assert (node.removals.found[BAD].round, node.removals.found[BAD].by) == (7, "voters")
    node.hear(Exclude(Round(5), BAD, ""))
    assert (node.removals.found[BAD].round, node.removals.found[BAD].by) == (5, "owner")


def test_this_node_stops_where_the_voters_exclude_it():
    node = Node(deciding=7).know(voted_out={ME: 7})
    node.removals.step()
    assert [type(event) for event in node.round] == [Pause]
    assert node.removals.trouble == "two thirds of the voters excluded this node from round 7 on"


def test_a_vote_is_written_once_and_says_what_is_missing():
    node = Node()
    said = node.removals.exclude(BAD, None, "noise")
    assert node.written == [Exclude(Round(3), BAD, "noise")]
    assert said == f"this node voted to exclude {BAD}: 1 of the 3 votes that exclude it"
    node.know(votes_against={ME: {BAD: 3}, OTHER: {BAD: 3}})
    assert "2 of the 3" in node.removals.exclude(BAD, Round(9), "")
    assert len(node.written) == 1
    node.machines.finality = replace(node.machines.finality, voters=(OWNER, BAD, OTHER))
    assert "no voter now" in node.removals.exclude(BAD, None, "")


def test_votes_beyond_those_that_count_are_refused():
    node = Node().know(votes_against={ME: {PeerId(f"peer-{n}"): 1 for n in range(MAX_VOTES)}})
    with pytest.raises(ConfigError, match="voted to exclude 16"):
        node.removals.exclude(BAD, None, "")
    assert not node.written


def test_what_is_shown_are_the_votes_of_voters_and_the_own_most_first():
    made_up = {PeerId(f"made-up-{n}"): {PeerId(f"peer-{n}"): 0} for n in range(100)}
    state = Node().know(votes_against={OTHER: {BAD: 3, OWNER: 1}, OWNER: {BAD: 1}, **made_up}).machines.finality
    assert votes_against(state) == (
        VotesAgainst(peer=BAD, votes=2, needed=3, by_us=False),
        VotesAgainst(peer=OWNER, votes=1, needed=3, by_us=False),
    )
    mine = {ME: {PeerId(f"peer-{n}"): 0 for n in range(2 * SHOWN)}}
    assert len(votes_against(Node().know(votes_against=mine).machines.finality)) == SHOWN


def test_who_works_in_another_chain_is_not_cut_off_yet():
    """Excluded in round 6 by the voters of an epoch that began with round 5."""
    body = Epoch(Round(5), b"", (ME,))
    ours = epoch_id(body)
    node = Node(deciding=9).know(voted_out={BAD: 6}, bodies={ours: body})
    segment = Segment(ours, 5, Electorate((ME, BAD)), Tally())
    node.machines.finality = replace(node.machines.finality, chain=(*node.machines.finality.chain, segment))
    node.removals.step()
    assert (node.removals.found[BAD].round, node.cut) == (6, {})
    node.know(chosen={BAD: ours}).removals.step()
    assert set(node.cut) == {BAD}


# --- work that is taken out of final rounds -----------------------------------------------------------


def excising(me=OWNER, window=8, works=(BAD, OTHER), **more):
    """A node whose rounds 1 and 2 have a contribution of each of these."""
    node = Node(me=me, **more)
    names = {digest(peer.encode()): peer for peer in works}
    node.machines.finality = replace(
        node.machines.finality, excise_rounds=window, window={1: names, 2: names} if window else {}
    )
    return node


def test_the_owner_takes_out_work_as_far_back_as_payloads_are_kept():
    node = excising()
    assert "a final round soon takes out its work since round 1" in node.removals.exclude(
        BAD, None, "noise", Round(0)
    )
    assert node.written == [Excise(Round(3), BAD, "noise", Round(1))]
    node.know(to_excise={BAD: 1}, excluded={BAD: 3})
    node.removals.exclude(BAD, None, "", Round(2))
    assert len(node.written) == 1, "that is wanted already"


def test_a_member_that_is_excluded_already_can_still_be_excised():
    node = excising().hear(Exclude(Round(2), BAD, ""))
    node.removals.exclude(BAD, None, "", Round(0))
    assert node.written == [Excise(Round(3), BAD, "", Round(1))]


def test_on_another_node_it_is_a_vote():
    node = excising(me=ME)
    assert "with as many for it they take out its work since round 1" in node.removals.exclude(
        BAD, None, "", Round(0)
    )
    assert node.written == [Excise(Round(3), BAD, "", Round(1))]


@pytest.mark.parametrize(
    ("more", "peer", "said"),
    [
        ({"window": 0}, BAD, "no node of this run keeps the payloads"),
        ({}, ME, "has no work in the rounds 1 to 2"),
        ({"is_synced": False}, BAD, "has not compared"),
        ({"disk": False}, BAD, "the disk refused"),
    ],
)
def test_what_cannot_be_taken_out_is_refused_in_one_line(more, peer, said):
    node = excising(**more)
    with pytest.raises((ConfigError, LocalFault), match=said):
        node.removals.exclude(peer, None, "", Round(0))


def test_a_node_that_lacks_a_payload_gets_it_before_it_asks_for_a_correction():
    node = excising()
    node.has_payloads = False
    with pytest.raises(LocalFault, match="lacks payloads"):
        node.removals.exclude(BAD, None, "", Round(0))
    assert [one.round for one in node.asked[-1]] == [1, 2]
    assert not node.written


def test_finality_learns_whose_work_this_node_could_take_out_and_the_user_what_was():
    node = excising().know(excluded={BAD: 3}, to_excise={BAD: 0})
    node.hear(Excise(Round(3), BAD, "", Round(0)))
    assert node.finality == [CorrectionsHeld(frozenset({BAD}))]
    (shown,) = node.removals.shown()
    assert (shown.excise_since, shown.excised_in) == (0, None)
    node.machines.finality = replace(node.machines.finality, excised={BAD: Excision(3, 0)}, last_final=9)
    (shown,) = node.removals.shown()
    assert (shown.excise_since, shown.excised_in) == (0, 3)
    assert "taken out in round 3" in node.removals.exclude(BAD, None, "", Round(0))
    node = excising(is_synced=False).know(excluded={BAD: 3}, to_excise={BAD: 0})
    node.hear(Excise(Round(3), BAD, "", Round(0)))
    assert not node.finality, "the rest of the ledger may say that it was done"
