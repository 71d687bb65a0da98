"""A mapping that shares what it was copied from is a dict to whoever reads it."""

from hypothesis import given
from hypothesis import strategies as st

from atoll.protocols.layered_map import PLAIN, LayeredMap, put

ENTRIES = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 3)), max_size=100)


@given(st.sampled_from([0, 10, PLAIN - 1, PLAIN, 4 * PLAIN]), ENTRIES)
def test_it_is_the_dict_of_the_same_entries(size, after):
    plain = dict.fromkeys(range(size), 9)
    mapping, copies = plain, []
    for key, value in after:
        copies.append((mapping, dict(mapping)))
        mapping = put(mapping, key, value)
        plain = {**plain, key: value}
    assert mapping == plain
    assert plain == mapping
    assert {**mapping} == plain
    assert (len(mapping), list(mapping)) == (len(plain), list(plain))
    assert all(mapping[key] == plain[key] and key in mapping for key in plain)
    assert -1 not in mapping
    assert mapping.get(-1) is None
    assert all(old == content for old, content in copies[-20:]), "nobody sees what came later"


@given(ENTRIES)
def test_two_that_came_about_in_other_orders_are_equal(entries):
    entries = [(key, key + 1) for key in dict(entries)]
    one = two = LayeredMap({}, {})
    for each, other in zip(entries, reversed(entries), strict=True):
        one, two = one.put(*each), two.put(*other)
    assert one == two
    assert one != one.put(-1, 0)
    assert one.put(-1, 0) != two.put(-1, 1)


def test_few_of_many_copies_copy_all():
    mapping, whole = put({key: key for key in range(PLAIN)}, -1, -1), 0
    for key in range(10_000):
        after = put(mapping, key, key)
        whole += after._base is not mapping._base
        assert len(after._newest) ** 2 <= len(after._base)
        mapping = after
    assert whole < 300
