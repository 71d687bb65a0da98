"""Merkle trees: every run of leaves verifies, nothing else does, and paths within a part are those of the tree."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from atoll.protocols.errors import DecodeError
from atoll.protocols.merkle import MerklePart, check_path, leaf_of, levels_of, path_digests, path_of


@st.composite
def runs(draw):
    total = draw(st.integers(1, 70))
    first = draw(st.integers(0, total - 1))
    return total, first, draw(st.integers(1, total - first))


def tree_of(total):
    return levels_of(leaf_of(number.to_bytes(2, "little")) for number in range(total))


def test_golden_roots():
    roots = [tree_of(total)[-1][0].hex()[:16] for total in (1, 2, 3, 7)]
    assert roots == ["91525ff00a3755a8", "cc11f5c7eec8d9de", "1945c9029c0b47c9", "2f2a13896287f1cd"]


@settings(deadline=None)
@given(runs())
def test_every_run_of_leaves_verifies_and_holds_the_paths_of_its_leaves(run):
    total, first, count = run
    levels = tree_of(total)
    path = path_of(levels, first, count)
    assert len(path) <= 2 * 32 * total.bit_length()
    assert len(path) == 32 * path_digests(total, first, count)
    check_path(levels[-1][0], total, first, levels[0][first : first + count], path)
    part = MerklePart(total, first, levels[0][first : first + count], path)
    for leaf in range(first, first + count):
        for some in range(1, first + count - leaf + 1):
            assert part.path(leaf, some) == path_of(levels, leaf, some)


@settings(max_examples=300, deadline=None)
@given(runs(), st.data())
def test_a_changed_leaf_place_or_path_does_not_verify(run, data):
    total, first, count = run
    levels = tree_of(total)
    leaves, path = levels[0][first : first + count], path_of(levels, first, count)
    kind = data.draw(st.sampled_from(["leaf", "path", "longer", "shorter", "place"]))
    if kind == "leaf":
        at = data.draw(st.integers(0, count - 1))
        leaves = [*leaves[:at], leaf_of(b"other"), *leaves[at + 1 :]]
    elif kind == "path":
        assume(path)
        at = data.draw(st.integers(0, len(path) - 1))
        path = path[:at] + bytes([path[at] ^ 1]) + path[at + 1 :]
    elif kind == "longer":
        path += bytes(data.draw(st.sampled_from([1, 32])))
    elif kind == "shorter":
        assume(path)
        path = path[: -data.draw(st.sampled_from([1, 32]))]
    else:
        moved = data.draw(st.integers(-2, total + 2))
        assume(moved != first)
        first = moved
    with pytest.raises(DecodeError):
        check_path(levels[-1][0], total, first, leaves, path)


def test_a_node_is_no_leaf():
    """Without different prefixes the two leaves of a node could be shown as one leaf."""
    one, two = leaf_of(b"1"), leaf_of(b"2")
    assert levels_of([one, two])[-1][0] != leaf_of(one + two)
