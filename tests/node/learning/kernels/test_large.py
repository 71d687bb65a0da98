"""Memory of large arrays is used again, and never by two arrays at once."""

import gc
import sys

import pytest
import torch

from atoll.node.learning.kernels import compiled as large
from atoll.node.learning.kernels.compiled import LEAST_BYTES, SPARE, fresh_like

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="NOT TESTED: no private mappings here")
ROWS = LEAST_BYTES // 4 // 4096


def like(rows=ROWS):
    return torch.empty((1, 4096), dtype=torch.int32).expand(rows, 4096)


def test_what_was_dropped_is_used_again():
    first = fresh_like(like())
    place = first.data_ptr()
    view = first[3:5]
    del first
    assert fresh_like(like()).data_ptr() != place, "a view of it lives"
    del view
    gc.collect()
    places = {each.data_ptr() for each in [fresh_like(like()) for _ in range(SPARE)]}
    assert place in places


def test_arrays_that_live_do_not_share():
    arrays = [fresh_like(like()) for _ in range(4)]
    for number, each in enumerate(arrays):
        each.fill_(number)
    assert [int(each.min()) for each in arrays] == [int(each.max()) for each in arrays] == [0, 1, 2, 3]
    assert all(
        each.data_ptr() % 4096 == 0 and each.is_contiguous() and each.shape == (ROWS, 4096) for each in arrays
    )


def test_no_more_than_some_are_kept_and_none_of_another_size():
    arrays = [fresh_like(like()) for _ in range(SPARE + 3)]
    del arrays
    gc.collect()
    assert len(large._spare) == SPARE
    other = fresh_like(like(ROWS + 1))
    assert other.shape == (ROWS + 1, 4096)
    assert not large._spare


def test_a_numpy_view_keeps_the_memory():
    array = fresh_like(like())
    seen = array.numpy()
    array.fill_(7)
    del array
    gc.collect()
    fresh_like(like()).fill_(1)
    assert int(seen.min()) == 7
