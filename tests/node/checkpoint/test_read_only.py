"""Reading a state whose worker runs: what is read is one state, whole, and nothing of the folder changes."""

import gc
import os
import shutil

import pytest
import torch

from atoll.node.checkpoint import read_only
from atoll.node.checkpoint.generations import SavedArray, array_file, finished, tensor_file
from atoll.node.checkpoint.local import FINAL, LocalBody, begin_local
from atoll.node.checkpoint.mapped_arrays import MappedArrays
from atoll.node.checkpoint.read_only import read_final
from atoll.node.learning.outer.fixed import state_digest, state_header
from atoll.protocols.errors import CorruptFault
from atoll.protocols.ids import RunId

RUN = RunId(bytes(32))


def values(number: int) -> torch.Tensor:
    return torch.full((2, 4096), number, dtype=torch.int32)


def save(folder, number: int, final: torch.Tensor | None = None, arrays: MappedArrays | None = None) -> None:
    """A generation of round `number`, Θ_final among the tensors, or (with `arrays`) a file of its own."""
    final = values(number) if final is None else final
    state = state_digest(final)
    body = LocalBody(RUN, number, state, 5, ())
    others = {"residual": torch.ones((2, 4096)), "zzz": torch.ones(3, dtype=torch.int32)}
    if arrays is None:
        begin_local(folder, body, {FINAL: final, **others}).finish()
        return
    path = arrays.path_of(final)
    saved = SavedArray(final, path, state_header(len(final)), state)
    begin_local(folder, body, others, (), {FINAL: saved}).finish()


def listed(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def damage(path) -> None:
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("is_mapped", [False, True])
def test_the_newest_state_is_read_with_its_round_and_digest(tmp_path, is_mapped):
    arrays = MappedArrays(tmp_path / "arrays") if is_mapped else None
    for number in (3, 4):
        final = arrays.fresh(values(0)).copy_(values(number)) if arrays else None
        save(tmp_path / "state", number, final, arrays)
    found = read_final(tmp_path / "state", RUN, state_digest)
    assert (found.round, found.state) == (4, state_digest(values(4)))
    assert torch.equal(found.theta_C4096, values(4))


def test_nothing_saved_is_none(tmp_path):
    assert read_final(tmp_path / "state", RUN, state_digest) is None


def test_a_damaged_newest_falls_back_and_stays_where_it_is(tmp_path):
    """Only the worker, which has the lock, sets a generation aside."""
    folder = tmp_path / "state"
    save(folder, 3)
    save(folder, 4)
    newest = finished(folder)[0]
    damage(newest / "manifest")
    before = listed(folder)
    assert read_final(folder, RUN, state_digest).round == 3
    assert listed(folder) == before


def test_weights_without_their_digest_are_not_read(tmp_path):
    save(tmp_path / "state", 3)
    file = tensor_file(finished(tmp_path / "state")[0])
    data = bytearray(file.read_bytes())
    at = bytes(data).index(values(3).numpy().tobytes())
    data[at] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptFault, match="do not have the digest"):
        read_final(tmp_path / "state", RUN, state_digest)


def test_another_run_is_refused(tmp_path):
    save(tmp_path / "state", 3)
    with pytest.raises(CorruptFault, match="another run"):
        read_final(tmp_path / "state", RunId(b"x" * 32), state_digest)


@pytest.mark.skipif(os.name != "posix", reason="NOT TESTED: states are in memory here")
def test_a_file_that_the_worker_uses_again_changes_nothing_that_was_read(tmp_path):
    """The worker writes a new state into the file of an old one as soon as no generation names it."""
    folder, arrays = tmp_path / "state", MappedArrays(tmp_path / "arrays")
    first = arrays.fresh(values(0)).copy_(values(1))
    save(folder, 1, first, arrays)
    inode = array_file(finished(folder)[0], FINAL).stat().st_ino
    found = read_final(folder, RUN, state_digest)
    del first
    gc.collect()
    used = set()
    for number in range(2, 8):
        final = arrays.fresh(values(0)).copy_(values(number))
        used.add(arrays.path_of(final).stat().st_ino)
        save(folder, number, final, arrays)
        del final
        gc.collect()
    assert inode in used, "the file was used again"
    assert torch.equal(found.theta_C4096, values(1))
    assert state_digest(found.theta_C4096) == found.state


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_worker_that_deletes_what_was_listed_has_saved_a_newer_one(tmp_path, monkeypatch, goes_on):
    folder = tmp_path / "state"
    save(folder, 3)
    lists = []

    def listing(where):
        found = finished(where)
        lists.append(found)
        if len(lists) == 1 and goes_on:  # the worker goes on between the list and the read
            shutil.move(found[0], tmp_path / "gone")
            save(folder, 9)
        if not goes_on and len(lists) == 1:
            shutil.rmtree(found[0] / "manifest", ignore_errors=True)
            (found[0] / "manifest").unlink()
        return found

    monkeypatch.setattr(read_only, "finished", listing)
    if goes_on:
        assert read_final(folder, RUN, state_digest).round == 9
        return
    with pytest.raises(CorruptFault, match="it is gone"):
        read_final(folder, RUN, state_digest)
    assert len(lists) == 2, "a list that stays the same is not tried again"
