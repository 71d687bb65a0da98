"""A member with two histories of its feed, in a run whose ledgers are cut at certified summaries."""

import json

import msgspec
import pytest
from msgspec.structs import replace

from atoll.node.daemon.certificates.full_summary import decode_full
from atoll.node.daemon.consensus import machine
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.ledger.records import Body, Contribution, Entry, encode_entry, sign_entry
from atoll.protocols.run.sections.history import HistorySpec

KEPT, EVERY = 24, 8


@pytest.fixture(autouse=True)
def window(monkeypatch):
    """Forks are looked at as far back as records are kept, as in the product."""
    monkeypatch.setattr(machine, "DECIDED_KEPT", KEPT)


def certifying(spec):
    return replace(spec, history=HistorySpec(every=EVERY))


def known_final(nodes):
    return min(node.driver.finality.last_final if node.driver else -1 for node in nodes)


def sign_two_histories(w, liar, others, alone):
    """The next contribution of `liar` has a twin, which one of the others gets instead; it writes no more."""
    said, publish = [], liar.driver.net.publish

    def lie(body: Body) -> Entry:
        if not said and not isinstance(body, Contribution):
            return publish(body)
        last = liar.swarm.ledger.head(liar.peer)
        made = sign_entry(w.spec.id, liar.identity, last.seq + 1, last.id, body)
        twin = msgspec.structs.replace(body, tokens=body.tokens + 1) if not said else body
        other = sign_entry(w.spec.id, liar.identity, last.seq + 1, last.id, twin)
        for node in others if not said else ():
            entry = other if node is alone else made
            node.swarm.replication._on_entry(liar.peer, encode_entry(entry))
        said.append(body)
        return made

    liar.driver.net.publish = lie
    return said


@pytest.mark.slow(
    slice="tests/node/daemon/certificates/test_proven.py::test_ledgers_are_cut_again_and_all_write_the_same_bytes"
)
def test_it_stops_neither_the_run_nor_its_cuts_and_keeps_no_newcomer_out(world):
    """The final set names the history that the run's owner lacks. Without a rule for proofs nobody cut again."""

    async def story() -> None:
        async with world(200, 4, adjust=certifying) as w:
            for number in range(4):
                w.start(number, recent=(KEPT, EVERY))
            others = [w.nodes[number] for number in range(3)]
            await w.until(lambda: known_final(others) >= 50)
            assert all(node.driver.history.last_gone >= 15 for node in others), "their ledgers are cut"
            liar = w.nodes[3]
            said = sign_two_histories(w, liar, others, alone=others[0])
            await w.until(lambda: bool(said))
            payload = said[0].payload
            await w.until(lambda: all(node.swarm.blobs.store.has(payload) for node in others))
            await w.kill(3)
            del w.nodes[3], w.hosts[3]
            at = known_final(others)
            await w.until(lambda: known_final(others) >= at + 20, 600.0)
            assert all(node.swarm.ledger.equivocators() == {liar.peer} for node in others)
            assert others[0].swarm.ledger.orphans(), "it got what the final set names by name only"
            late = w.start(4, recent=(KEPT, EVERY))
            others.append(late)  # its first summary is older than the proof
            await w.until(lambda: known_final(others) >= at + KEPT + 3 * EVERY, 600.0)
            assert min(node.driver.history.last_gone for node in others) > at, "ledgers are cut behind the fork"
            later = w.start(5, recent=(KEPT, EVERY))
            others.append(later)  # it gets the proof, and never the feed
            await w.until(lambda: later.worker.final >= known_final(others[:3]) - 1 > at + 2 * KEPT, 600.0)
            assert later.swarm.ledger.equivocators() == {liar.peer}
            assert liar.peer not in later.swarm.ledger.vector()
            for node in others:
                assert liar.peer not in decode_full(node.swarm.ledger.history.links[-1].summary).places
            w.check_agreement()
            for node in w.nodes.values():
                found = map(json.loads, (node.home / "events.jsonl").read_text().splitlines())
                assert not {event["event"] for event in found} & {"other_summary", "divergence"}

    run_virtual(story())
