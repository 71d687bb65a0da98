"""Which contributions a full set names: the same on all nodes, and no flood takes the places of members."""

from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.protocols.ids import PeerId, RunId, digest
from atoll.protocols.ledger.records import MAX_SET
from atoll.protocols.ledger.set_limit import Seniority, first_authors, first_places

RUN = RunId(digest(b"run"))
PEERS = [PeerId(f"peer{number}") for number in range(24)]
GROUPS = st.frozensets(st.sampled_from(PEERS))


def entry(author, which=0):
    return digest(b"entry", author.encode(), bytes([which]))


def places(authors, number, seniority, most, which=0):
    return first_places(RUN, number, {entry(a, which): a for a in authors}, seniority, most)


@given(
    authors=st.lists(st.sampled_from(PEERS), unique=True),
    number=st.integers(0, 1 << 40),
    newest=st.lists(GROUPS, max_size=4),
    accepted=GROUPS,
    most=st.integers(0, 20),
    data=st.data(),
)
@settings(deadline=None)
def test_a_set_has_places_for_so_many_and_all_nodes_choose_the_same(authors, number, newest, accepted, most, data):
    seniority = Seniority(tuple(newest), accepted)
    found = places(authors, number, seniority, most)
    assert len(found) == min(most, len(authors))
    assert found == tuple(sorted(found))
    shuffled = data.draw(st.permutations(authors))
    assert places(shuffled, number, seniority, most) == found
    # What an author writes gives it no place: of entries anybody can make as many as it takes.
    other = places(authors, number, seniority, most, which=1)
    named = {a for a in authors if entry(a) in found}
    assert {a for a in authors if entry(a, 1) in other} == named
    assert named == first_authors(RUN, number, authors, seniority, most)
    # Whoever was accepted has a place before all that were not.
    members = accepted.union(*newest)
    assert named >= members.intersection(authors) or named <= members


@given(sets=st.lists(GROUPS, min_size=2, max_size=16), flood=GROUPS, others=GROUPS, number=st.integers(0, 99))
@settings(deadline=None)
def test_who_is_in_all_of_the_newest_sets_stays_in(sets, flood, others, number):
    """However many others were ever accepted, and whoever comes: those sets had no more places either."""
    most = max(1, max(map(len, sets)))
    regulars = sets[0].intersection(*sets[1:])
    authors = list(regulars | flood)
    assert regulars <= first_authors(RUN, number, authors, Seniority(tuple(sets), others), most)


def test_the_places_of_newcomers_change_with_the_round_and_the_run():
    """Who made up names that have luck in one round has none in the next."""
    first = [first_authors(run, at, PEERS, Seniority(), 8) for run in (RUN, RunId(digest(b"2"))) for at in (1, 2)]
    assert len({*first}) == 4


def test_a_flood_that_got_in_takes_no_place_of_a_member():
    """Five honest members; in each round a thousand of three thousand other authors, accepted ones among them."""
    honest = {PeerId(f"honest{number}") for number in range(5)}
    newest, accepted = [frozenset(honest)], frozenset(honest)
    for number in range(20):
        flood = {PeerId(f"eve{which}") for which in range(3000) if which % 3 != number % 3}
        found = first_authors(RUN, number, honest | flood, Seniority(tuple(newest[-16:]), accepted))
        assert (len(found), found >= honest) == (MAX_SET, True)
        newest, accepted = [*newest, found], accepted | found
