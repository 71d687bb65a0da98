"""Rows that others ask for: any span, from a payload that is here, and nothing of it on our disk."""

from itertools import combinations

import pytest

from atoll.node.daemon.reduction.audit import MOST_OPENINGS, Openings
from atoll.node.daemon.reduction.ledger_view import ReducedSets
from atoll.node.daemon.reduction.row_fetcher import SliceSources
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

    def held(self, named):
        return self.blob_path(named.payload).exists()

    def blob_path(self, blob):
        return self.folder / blob.hex()


@pytest.fixture
def node(small, tmp_path):
    world, troubles = small.world, []
    sets = ReducedSets(world.peers[0], world.rules, ReduceSpec(above=1, gap=2, k=16))
    for entry in world.entries.values():
        sets.note(entry)
        (tmp_path / entry.body.payload.hex()).write_bytes(world.payloads[entry.id])
    store = Store(tmp_path)
    sources = SliceSources(store, sets, store, tmp_path / "rows", lambda *_: None, troubles.append)
    return world, small.offers[0], sources, troubles


def files(sources):
    return list(sources.shelf.path(bytes(32), Span(0, 1)).parent.iterdir())


def test_whatever_span_is_asked_for_leaves_nothing_on_the_disk(node):
    world, offer, sources, _ = node
    for start, stop in combinations(range(CHUNKS + 1), 2):
        data = sources.rows_for(RowsAsk(offer.entry, Span(start, stop)))
        found = codec.decode(data, RowsAnswer)
        checked_rows(world.trees[offer.entry].root, CHUNKS, K, Span(start, stop), found.rows, found.path)
    assert files(sources) == []
    with pytest.raises(DecodeError):
        sources.rows_for(RowsAsk(offer.entry, Span(0, CHUNKS + 1)))


def test_rows_that_this_node_needs_itself_are_kept(node):
    _, offer, sources, _ = node
    span = Span(1, 4)
    assert sources.has_rows(offer, span)
    assert [path.name for path in files(sources)] == [f"{offer.entry.hex()}-1-4.rows"]
    assert sources.rows_for(RowsAsk(offer.entry, span)) == files(sources)[0].read_bytes()


def test_a_disk_that_lost_what_is_asked_for_is_trouble_and_no_crash(node):
    world, offer, sources, troubles = node
    payload = sources._net.blob_path(world.entries[offer.entry].body.payload)
    payload.unlink()
    payload.mkdir()
    assert sources.rows_for(RowsAsk(offer.entry, Span(0, 2))) == b""
    assert not sources.has_rows(offer, Span(0, 2))
    assert len(troubles) == 2


def test_a_peer_is_given_some_openings_of_a_reduction_and_no_more(node, small, tmp_path):
    """Each of them takes the worker's time between two steps."""
    world, _, sources, _ = node
    claims = [world.reduce(0, small.offers, number) for number in (2, 3)]
    for claim in claims:
        sources._sets.note(world.entries[claim.entry])
    openings = Openings(None, sources._sets, tmp_path, None, None, None, None)
    given = [sum(openings.may_ask(peer, claims[0]) for _ in range(50)) for peer in world.peers[1:3]]
    assert given == [MOST_OPENINGS, MOST_OPENINGS]
    assert openings.may_ask(world.peers[1], claims[1])
    sources._sets.forget(10_000)
    openings.forget(10_000)
    assert openings._asked == {}
