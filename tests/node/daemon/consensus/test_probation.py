"""Who decides after a final set: those whose work was in enough sets, so that no cheap identity owns finality."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.protocols.ids import PeerId
from atoll.protocols.ledger.ballots import quorum
from atoll.protocols.ledger.probation import Tally
from tests.node.daemon.consensus.epoch_world import LEASE, ROUND, World, final
from tests.node.daemon.consensus.test_vote_rule import Voter, named, peers, propose

PEERS = [PeerId(f"peer-{number}") for number in range(12)]
sets = st.lists(st.sets(st.sampled_from(PEERS), min_size=1), max_size=12)
some = st.sets(st.sampled_from(PEERS), min_size=1)


def tally_of(chain, probation):
    tally = Tally(probation)
    for authors in chain:
        tally = tally.after(authors)
    return tally


def needed(tally):
    return min(tally.probation, (tally.rounds + 2) // 2)


def work(tally, author):
    return tally.counts.get(author, 0) + 1


@given(chain=sets, authors=some)
def test_without_probation_all_authors_decide(chain, authors):
    assert tally_of(chain, 1).proven(authors) == authors


@given(chain=sets, authors=some, probation=st.integers(2, 9))
def test_who_decides_worked_long_enough_or_longest_and_somebody_does(chain, authors, probation):
    tally = tally_of(chain, probation)
    proven = tally.proven(authors)
    assert proven
    assert proven <= authors
    long = {author for author in authors if work(tally, author) >= needed(tally)}
    most = max(work(tally, author) for author in authors)
    assert proven == (long or {author for author in authors if 2 * work(tally, author) >= most})


@given(chain=sets, author=st.sampled_from(PEERS), probation=st.integers(1, 9))
def test_an_author_decides_after_as_many_more_sets_as_it_is_told(chain, author, probation):
    tally = tally_of(chain, probation)
    told, veteran = tally.missing(author), PeerId("veteran")
    tally = replace(tally, counts={**tally.counts, veteran: tally.rounds})
    assert told <= probation
    for _ in range(told - 1):
        assert author not in tally.proven({author, veteran})
        tally = tally.after({author, veteran})
    if told == 0 and probation > 1 and tally.rounds:
        # It was proven in the newest set, or would have been.
        assert tally.counts.get(author, 0) >= min(probation, (tally.rounds + 1) // 2)
    elif told:
        assert author in tally.proven({author, veteran})


@given(chain=sets, authors=some, others=some, probation=st.integers(2, 9))
def test_no_choice_of_a_set_makes_an_author_decide_that_did_not_work_long(chain, authors, others, probation):
    tally = tally_of(chain, probation)
    if any(work(tally, author) >= needed(tally) for author in authors):
        both = tally.proven(authors | others)
        assert tally.proven(authors) == both & authors


@given(chain=sets, authors=some, probation=st.integers(2, 9), more=st.integers(1, 9))
def test_a_member_decides_after_so_many_sets_whatever_others_do(chain, authors, probation, more):
    tally = tally_of(chain, probation)
    for _ in range(probation - 1):
        tally = tally.after(authors)
    assert tally.proven(authors) == authors


@given(data=st.data(), chain=sets, view=some, probation=st.integers(2, 6))
@settings(max_examples=300)
def test_liars_below_a_third_of_the_proven_get_no_quorum_of_a_set_that_voters_accept(data, chain, view, probation):
    """Any number of unproven identities is in the set, or is left out of it."""
    tally = tally_of(chain, probation)
    proven = tally.proven(view)
    if max(work(tally, author) for author in view) < needed(tally):
        return  # all that worked long are gone
    liars = set(data.draw(st.permutations(sorted(proven)))[: len(proven) // 3])
    accepted = data.draw(st.sets(st.sampled_from(sorted(view)), min_size=1))
    if 2 * len(accepted & proven) > len(proven):
        deciding = tally.proven(accepted)
        assert len(deciding & (liars | (view - proven))) < quorum(len(deciding))


@given(count=st.integers(2, 8), data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_vote_needs_more_than_half_of_the_proven_work_that_the_voter_has(count, data):
    all_of_them = peers(count)
    old = set(data.draw(st.lists(st.sampled_from(all_of_them), unique=True, min_size=1)))
    theirs = data.draw(st.lists(st.sampled_from(all_of_them), unique=True, min_size=1))
    node = Voter(all_of_them, all_of_them[-1])
    node.state = replace(node.state, tally=Tally(4, 20, dict.fromkeys(old, 20)))
    node.close(*all_of_them)
    node.hear(all_of_them[0], propose(named(*theirs), all_of_them[0]))
    assert len(node.votes()) == (2 * len(old & set(theirs)) > len(old))


@pytest.mark.parametrize("way", ["vanish", "never vote"])
@pytest.mark.parametrize("seed", range(3))
def test_identities_that_work_for_less_than_the_probation_never_decide_and_stop_nothing(way, seed):
    """Five of eight would be more than a third, and stop finality for a lease."""
    world = World(seed, 8, probation=8)
    for node in world.nodes[3:]:
        node.is_up = False
    world.run(25 * ROUND)
    for node in world.nodes[3:]:
        node.is_up = True
        node.boot(world.now)
        node.round = max(world.nodes[0].rounds)
        if way == "never vote":
            node.write = lambda body, node=node, write=node.write: (
                write(body) if type(body).__name__ == "Contribution" else node.feed_refused(body)
            )
            node.feed_refused = lambda body: None
    members = {node.peer for node in world.nodes[3:]}

    def counts():
        return {peer: world.nodes[0].state.tally.counts.get(peer, 0) for peer in members}

    while max(counts().values()) < 6:
        world.step()
        assert not any(members & set(node.state.voters) for node in world.nodes[:3]), counts()
        assert world.now < 2000
    assert min(counts().values()) > 0, "their work counts"
    for node in world.nodes[3:]:
        node.is_up = way == "never vote"
    before, epochs = final(world.nodes[0]), [len(node.state.chain) for node in world.nodes[:3]]
    world.run(LEASE // 2)
    assert min(final(node) for node in world.nodes[:3]) >= before + 1, "no lease has ended yet"
    assert [len(node.state.chain) for node in world.nodes[:3]] == epochs


@pytest.mark.parametrize("seed", range(3))
def test_a_member_that_joins_decides_after_its_probation(seed):
    world = World(seed, 4, probation=6)
    late = world.nodes[3]
    late.is_up = False
    world.run(15 * ROUND)
    late.is_up = True
    late.boot(world.now)
    began = final(world.nodes[0])
    while late.peer not in world.nodes[0].state.voters:
        world.step()
        assert world.now < 2000
    state = world.nodes[0].state
    assert state.tally.counts[late.peer] == 6
    assert state.last_final >= began + 5
    world.run(10 * ROUND)
    world.agree()


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("way", ["stop", "vanish"])
def test_few_members_go_on_in_the_probation_of_one_of_them(count, way):
    """All that worked long are gone, and the newcomer is left."""
    world = World(count, count, probation=50)
    late = world.nodes[-1]
    late.is_up = False
    world.run(20 * ROUND)
    late.is_up = True
    late.boot(world.now)
    world.run(4 * ROUND)
    for node in world.nodes[:-1]:
        if way == "stop":
            node.stop()
            world.spread(1.0)
        node.is_up = False
    before = final(late)
    world.run(LEASE + 12 * ROUND)
    assert final(late) > before + 4
    for node in world.nodes[:-1]:
        node.is_up = True
        node.boot(world.now)
    world.run(LEASE + 10 * ROUND)
    world.agree()
    assert final(late) > before + 12
