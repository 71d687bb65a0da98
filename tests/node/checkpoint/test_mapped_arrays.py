"""Arrays in mapped files: no memory of the process, no store into a full disk, no file that two arrays share."""

import errno
import gc
import mmap
import os

import pytest
import torch

from atoll.node.checkpoint.mapped_arrays import SPARE, MappedArrays
from atoll.protocols.errors import DiskFault

LIKE = torch.empty((2, 4096), dtype=torch.int32)
pytestmark = pytest.mark.skipif(os.name != "posix", reason="NOT TESTED: states are in memory here")


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_an_array_is_its_file(tmp_path):
    arrays = MappedArrays(tmp_path / "arrays")
    one, two = arrays.fresh(LIKE), arrays.fresh(LIKE)
    one.fill_(7)
    two.fill_(8)
    assert (one.shape, one.dtype, one.data_ptr() % 4096) == (LIKE.shape, LIKE.dtype, 0)
    for values in (one, two):
        assert arrays.path_of(values).read_bytes() == values.numpy().tobytes()
    assert arrays.path_of(LIKE) is None
    assert len(files(tmp_path / "arrays")) == 2


def test_the_file_of_a_dropped_array_is_used_again_unless_a_generation_has_it(tmp_path):
    arrays = MappedArrays(tmp_path / "arrays")
    saved, other = arrays.fresh(LIKE), arrays.fresh(LIKE)
    saved.fill_(7)
    os.link(arrays.path_of(saved), tmp_path / "generation")
    before = arrays.path_of(other).name
    view = saved[1:]
    del saved, other
    gc.collect()
    assert len(files(tmp_path / "arrays")) == 2, "a view of it lives"
    assert arrays.path_of(arrays.fresh(LIKE)).name == before
    del view
    gc.collect()
    for _ in range(3):
        arrays.fresh(LIKE).fill_(1)
    assert (tmp_path / "generation").read_bytes() == torch.full_like(LIKE, 7).numpy().tobytes()
    (tmp_path / "generation").unlink()
    count = len(files(tmp_path / "arrays"))
    held = [arrays.fresh(LIKE), arrays.fresh(LIKE)]
    assert len(files(tmp_path / "arrays")) == count, "its generation is gone"
    assert held[0].data_ptr() != held[1].data_ptr()


def test_few_dropped_files_stay_and_none_of_another_size(tmp_path):
    arrays = MappedArrays(tmp_path / "arrays")
    held = [arrays.fresh(LIKE) for _ in range(SPARE + 3)]
    del held
    gc.collect()
    assert len(files(tmp_path / "arrays")) == SPARE
    larger = arrays.fresh(torch.empty((3, 4096)))
    assert files(tmp_path / "arrays") == [arrays.path_of(larger).name]


def test_a_saved_array_is_mapped_and_a_mistake_cannot_change_it(tmp_path):
    arrays = MappedArrays(tmp_path / "arrays")
    made = arrays.fresh(LIKE).fill_(3)
    os.link(arrays.path_of(made), tmp_path / "saved")
    again = MappedArrays(tmp_path / "later").opened(tmp_path / "saved", LIKE)
    assert torch.equal(again, made)
    again.zero_()
    assert torch.equal(made, torch.full_like(LIKE, 3))


def test_a_state_that_was_read_can_be_saved_after_its_generation_is_gone(tmp_path):
    arrays = MappedArrays(tmp_path / "arrays")
    (tmp_path / "saved").write_bytes(torch.full_like(LIKE, 3).numpy().tobytes())
    again = arrays.opened(tmp_path / "saved", LIKE)
    (tmp_path / "saved").unlink()
    assert arrays.path_of(again).read_bytes() == again.numpy().tobytes()


def test_what_is_written_into_an_array_that_was_made_after_one_was_read_is_in_its_file(tmp_path):
    """A private copy of pages is no file to write a state into."""
    arrays = MappedArrays(tmp_path / "arrays")
    (tmp_path / "saved").write_bytes(torch.full_like(LIKE, 3).numpy().tobytes())
    again = arrays.opened(tmp_path / "saved", LIKE)
    (tmp_path / "saved").unlink()
    del again
    gc.collect()
    made = arrays.fresh(LIKE).fill_(4)
    assert arrays.path_of(made).read_bytes() == made.numpy().tobytes()


def test_what_an_earlier_process_left_is_deleted(tmp_path):
    (tmp_path / "arrays").mkdir()
    (tmp_path / "arrays" / "dead-0").write_bytes(b"half")
    MappedArrays(tmp_path / "arrays")
    assert files(tmp_path / "arrays") == []


def test_a_full_disk_is_a_fault_and_not_the_end_of_the_process(tiny_disk):
    """A store into a mapping that the disk has no room for would be a signal."""
    arrays = MappedArrays(tiny_disk / "arrays")
    first = arrays.fresh(LIKE)  # 32 kB of 128
    first.fill_(1)
    for _ in range(2):
        with pytest.raises(DiskFault) as fault:
            arrays.fresh(torch.empty((8, 4096)))
        assert "free some space" in fault.value.hint
    assert files(tiny_disk / "arrays") == [arrays.path_of(first).name]
    arrays.fresh(LIKE).fill_(2)


def test_where_files_cannot_be_mapped_arrays_are_memory(tmp_path, monkeypatch):
    def refused(*_, **__):
        raise OSError(errno.ENODEV, "No such device")

    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", refused)
        arrays = MappedArrays(tmp_path / "arrays")
    values = arrays.fresh(LIKE)
    values.fill_(5)
    assert arrays.path_of(values) is None
    assert files(tmp_path / "arrays") == []
    (tmp_path / "saved").write_bytes(values.numpy().tobytes())
    assert torch.equal(arrays.opened(tmp_path / "saved", values), values)
