"""Rows that others ask for: any span, from a payload that is here, and nothing of it on our disk."""

from itertools import combinations

import pytest

from atoll.node.daemon.reduction.audit import SPARE_OPENINGS, ReducerAuditor
from atoll.node.daemon.reduction.ledger_view import ReductionLedger
from atoll.node.daemon.reduction.row_fetcher import RowFetcher, RowStore
from atoll.protocols import codec
from atoll.protocols.errors import DecodeError
from atoll.protocols.ledger.reduction import RowsAnswer, RowsAsk
from atoll.protocols.ledger.rows import checked_rows
from atoll.protocols.run.arena import Span
from atoll.protocols.run.slices import ReduceSpec
from tests.node.reduction_world import CHUNKS, K


class Store:
    """Payloads on disk, all of them held."""

    def __init__(self, folder):
        self.folder = folder

    def is_held(self, record):
        return self.blob_path(record.payload).exists()

    def blob_path(self, blob):
        return self.folder / blob.hex()


@pytest.fixture
def node(small, tmp_path):
    world, troubles = small.world, []
    sets = ReductionLedger(world.peers[0], world.rules, ReduceSpec(above=1, gap=2, k=16))
    for entry in world.entries.values():
        sets.add(entry)
        (tmp_path / entry.body.payload.hex()).write_bytes(world.payloads[entry.id])
    store = Store(tmp_path)
    sources = RowFetcher(
        net=store,
        ledger=sets,
        payloads=store,
        store=RowStore(tmp_path / "rows"),
        start_task=None,
        on_fault=lambda *_: None,
        on_disk_fault=troubles.append,
    )
    return world, small.offers[0], sources, troubles


def files(sources):
    return list(sources.store.path(bytes(32), Span(0, 1)).parent.iterdir())


def test_whatever_span_is_asked_for_leaves_nothing_on_the_disk(node):
    world, offer, sources, _ = node
    for start, stop in combinations(range(CHUNKS + 1), 2):
        data = sources.answer(RowsAsk(offer.entry, Span(start, stop)))
        found = codec.decode(data, RowsAnswer)
        checked_rows(world.trees[offer.entry].root, CHUNKS, K, Span(start, stop), found.rows, found.path)
    assert files(sources) == []
    with pytest.raises(DecodeError):
        sources.answer(RowsAsk(offer.entry, Span(0, CHUNKS + 1)))


def test_rows_that_this_node_needs_itself_are_kept(node):
    _, offer, sources, _ = node
    span = Span(1, 4)
    assert sources.has(offer, span)
    assert [path.name for path in files(sources)] == [f"{offer.entry.hex()}-1-4.rows"]
    assert sources.answer(RowsAsk(offer.entry, span)) == files(sources)[0].read_bytes()


def test_a_disk_that_lost_what_is_asked_for_is_trouble_and_no_crash(node):
    world, offer, sources, troubles = node
    payload = sources.net.blob_path(world.entries[offer.entry].body.payload)
    payload.unlink()
    payload.mkdir()
    assert sources.answer(RowsAsk(offer.entry, Span(0, 2))) == b""
    assert not sources.has(offer, Span(0, 2))
    assert len(troubles) == 2


def test_a_peer_is_given_some_openings_of_a_reduction_and_no_more(node, small, tmp_path):
    """Each of them takes the worker's time between two steps."""
    world, _, sources, _ = node
    claims = [world.reduce(0, small.offers, number) for number in (2, 3)]
    for claim in claims:
        sources.ledger.add(world.entries[claim.entry])
    auditor = ReducerAuditor(
        net=None,
        ledger=sources.ledger,
        spool=tmp_path,
        ask=None,
        publish=None,
        on_fault=None,
        on_unanswered=None,
        patience_s=None,
        rng=None,
    )
    given = [sum(auditor.may_ask(peer, claims[0]) for _ in range(50)) for peer in world.peers[1:3]]
    assert given == [SPARE_OPENINGS, SPARE_OPENINGS]
    assert auditor.may_ask(world.peers[1], claims[1])
    sources.ledger.forget(10_000)
    auditor.forget()
    assert auditor._openings_given == {}
