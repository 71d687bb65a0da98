"""Rows cut from a payload and put together again are the payload; parts verify against one root."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.protocols.errors import DecodeError
from atoll.protocols.ledger.reduction import rows_max_bytes
from atoll.protocols.ledger.rows import RowTree, checked_rows, cut_rows, join_rows, row_bytes, split_rows
from atoll.protocols.run.arena import Span
from atoll.protocols.run.payload import Layout


def payload_of(layout, seed=0):
    body = random.Random(seed).randbytes(layout.size_bytes - len(layout.header))
    return layout.header + body


@settings(deadline=None)
@given(st.integers(1, 20), st.sampled_from([1, 3, 64, 1000]), st.integers(0, 9))
def test_joined_rows_are_the_payload(chunks, k, seed):
    layout = Layout("sparse2", chunks, k)
    payload = payload_of(layout, seed)
    rows = cut_rows(payload, layout)
    assert {len(row) for row in rows} == {row_bytes(k)}
    assert join_rows(b"".join(rows), k) == payload
    assert split_rows(b"".join(rows), k) == rows


@settings(deadline=None)
@given(st.integers(1, 40), st.data())
def test_a_part_verifies_and_its_rows_one_by_one_too(chunks, data):
    layout = Layout("sparse2", chunks, 64)
    tree = RowTree(payload_of(layout), layout)
    first = data.draw(st.integers(0, chunks - 1))
    span = Span(first, data.draw(st.integers(first + 1, chunks)))
    rows, path = tree.part(span)
    assert len(rows) + len(path) <= rows_max_bytes(span, chunks, 64)
    part = checked_rows(tree.root, chunks, 64, span, rows, path)
    for start in range(span.start, span.stop):
        for some in (Span(start, stop) for stop in range(start + 1, span.stop + 1)):
            assert part.some(some, 64) == tree.part(some)
    at = data.draw(st.integers(0, len(rows) - 1))
    with pytest.raises(DecodeError):
        checked_rows(tree.root, chunks, 64, span, rows[:at] + bytes([rows[at] ^ 1]) + rows[at + 1 :], path)
    with pytest.raises(DecodeError):
        checked_rows(tree.root, chunks, 64, span, rows[:-1], path)


def test_broken_bytes_are_refused():
    layout = Layout("sparse2", 2, 64)
    with pytest.raises(DecodeError):
        cut_rows(payload_of(layout)[:-1], layout)
    with pytest.raises(DecodeError):
        join_rows(bytes(row_bytes(64) + 1), 64)
