"""The mark of a chain that a node leaves: the daemon writes it, a worker obeys it and takes it away."""

import os

import pytest

from atoll.node.ipc import chain_mark
from atoll.node.ipc.chain_mark import ChainMark
from atoll.protocols.errors import CorruptFault


def test_one_that_names_no_earlier_round_is_obeyed_with_the_one_before(tmp_path):
    mark = ChainMark(tmp_path)
    mark.put(10)
    mark.put(12)
    mark.remove(10)
    assert mark.first() is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_mark_that_comes_while_a_worker_starts_stays_for_the_next(tmp_path, monkeypatch, when):
    """Just before, or just after the worker takes the first one away."""
    mark, rename = ChainMark(tmp_path), os.rename
    mark.put(10)

    def beside(source, target) -> None:
        if when == "before":
            mark.put(8)
        rename(source, target)
        if when == "after":
            mark.put(8)

    with monkeypatch.context() as patch:
        patch.setattr(chain_mark.os, "rename", beside)
        mark.remove(10)
    assert mark.first() == 8
    mark.put(9)
    assert mark.first() == 8, "nobody has obeyed it"
    mark.remove(8)
    assert mark.first() is None


def test_a_mark_that_comes_between_the_two_steps_of_its_end_is_not_the_one_that_was_obeyed(tmp_path, monkeypatch):
    mark, read = ChainMark(tmp_path), chain_mark._read
    mark.put(5)

    def beside(path):
        found = read(path)
        monkeypatch.setattr(chain_mark, "_read", read)
        mark.put(9)
        return found

    monkeypatch.setattr(chain_mark, "_read", beside)
    mark.remove(5)
    assert mark.first() == 9


@pytest.mark.parametrize("data", [b"7" * 33, b"garbage"])
def test_one_that_holds_no_number_names_what_helps(tmp_path, data):
    """Moved away, it would let the state go on in the chain that the node left."""
    (tmp_path / chain_mark.MARK).write_bytes(data)
    with pytest.raises(CorruptFault) as found:
        ChainMark(tmp_path).first()
    assert found.value.hint == "write the number 0 into it"


@pytest.mark.parametrize("data", [b"", b"\n", b"   "])
def test_an_empty_one_is_of_round_0(tmp_path, data):
    (tmp_path / chain_mark.MARK).write_bytes(data)
    assert ChainMark(tmp_path).first() == 0


@pytest.mark.parametrize("before", [None, 10])
def test_one_that_a_worker_took_meanwhile_is_put_back_too(tmp_path, before):
    mark = ChainMark(tmp_path)
    if before is not None:
        mark.put(before)
    assert mark.put(8) == before
    mark.remove(10)
    assert mark.first() == 8
    mark.put_back(before)
    assert mark.first() == before


def test_what_a_mark_keeps(tmp_path):
    """A worker whose model is older than the round from which it is to be left goes on with it."""
    mark = ChainMark(tmp_path)
    assert mark.keeps(9) is None, "there is none"
    mark.put(10)
    assert (mark.keeps(9), mark.keeps(10), mark.keeps(None)) == (9, -1, -1)
    (tmp_path / "leaving-chain").write_text("ten")
    assert mark.keeps(9) == -1, "the worker says that it is damaged"
