"""What only the page shows: who contributed, what the node takes of the machine, and an invite."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from atoll.node.config.home import Home
from atoll.node.config.node_config import NodeConfig
from atoll.node.daemon.telemetry import contribution_reader
from atoll.node.daemon.telemetry.contribution_reader import KINDS, READ_S, ROUNDS_MAX, ContributionReader
from atoll.node.daemon.telemetry.machine_use import READING_S, MachineUse
from atoll.node.daemon.telemetry.page_source import PageSource
from atoll.node.daemon.telemetry.round_log import RoundLog
from atoll.node.daemon.web.page_data import RoundWork, SampleText
from atoll.node.runs.given_invites import find_given
from atoll.node.runs.presets import preset
from atoll.p2p.ledger.store import Ledger
from atoll.protocols.errors import ConfigError
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Digest
from atoll.protocols.ledger.records import Ack, AuditedContribution, Contribution, SlicedContribution
from atoll.protocols.run.invite import read_invite, read_short
from atoll.protocols.run.run_spec import RunSpec
from tests.node.daemon.web.fed_node import ROUND_ROW, Node

ONE, TWO = sorted((Identity(bytes([number]) * 32) for number in (1, 2)), key=lambda one: one.peer_id)
SPEC = preset("tiny", ONE.peer_id, 1, "synthetic:markov")


def work(number: int, loss: float, tokens: int = 64, kind=Contribution, **more):
    return kind(
        round=number, base=Digest(bytes(32)), payload=Digest(bytes(32)), steps=1, tokens=tokens, weight=64,
        loss=loss, **more,
    )  # fmt: skip


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    opened = Ledger(tmp_path / "ledger.sqlite", SPEC.id)
    yield opened
    opened.close()


def test_contributions_by_round_and_author(ledger):
    clock = SimpleNamespace(now=10.0)
    reader = ContributionReader(ledger, lambda: clock.now)
    assert reader.work([4, 5]) == []
    ledger.append(TWO, work(5, 2.5))
    ledger.append(ONE, work(5, 1.5, 32, AuditedContribution, verdicts=()))
    ledger.append(ONE, Ack(5, Digest(bytes(32)), Digest(bytes(32))))
    ledger.append(ONE, work(6, 3.0, 64, SlicedContribution, rows=Digest(bytes(32))))
    assert reader.work([4, 5]) == [], "a reading lasts for a while"
    clock.now += READ_S
    five = RoundWork(round=5, peers=(ONE.peer_id, TWO.peer_id), loss=(1.5, 2.5), tokens=(32, 64))
    assert reader.work([4, 5]) == [five]
    assert [found.round for found in reader.work([6, 7])] == [6]


def test_every_kind_of_contribution_is_read():
    kinds = Contribution.__subclasses__()
    assert set(KINDS) == {Contribution, *kinds, *(more for kind in kinds for more in kind.__subclasses__())}


def test_what_is_remembered_is_bounded(ledger, monkeypatch):
    monkeypatch.setattr(contribution_reader, "AUTHORS_MAX", 1)
    for author in (ONE, TWO):
        ledger.append(author, work(5, 2.5))
    reader = ContributionReader(ledger, lambda: 1.0)
    assert [found.peers for found in reader.work([5])] == [(ONE.peer_id,)]
    reader.work(range(3 * ROUNDS_MAX))
    assert len(reader._read) == ROUNDS_MAX


def test_the_use_of_the_machine_is_measured(tmp_path: Path):
    clock = SimpleNamespace(now=10.0)
    use = MachineUse(tmp_path, lambda: clock.now)
    first = use.read(0)
    assert (first.daemon_cores, first.worker_cores, first.worker_bytes) == (None, None, None)
    assert 1_000_000 < first.daemon_bytes < first.memory_bytes
    assert 0 < first.disk_free_bytes <= first.disk_bytes
    clock.now += READING_S / 2
    assert use.read(0) is first, "a reading lasts for a while"
    sum(range(3_000_000))
    clock.now += READING_S
    second = use.read(os.getppid())
    assert second.daemon_cores > 0.0
    assert second.worker_bytes > 0
    clock.now += READING_S
    assert use.read(1 << 22).worker_bytes is None, "a process that is gone"


@pytest.fixture
def source(tmp_path: Path, ledger: Ledger) -> Iterator[Callable[..., tuple[PageSource, Node]]]:
    """Makes the source of a page, and the node whose reports it has."""
    log = RoundLog(tmp_path, ONE.peer_id, lambda: 0.0)
    for number in range(5):
        log.rows.save(msgspec.structs.replace(ROUND_ROW, round=number))

    def make(spec: RunSpec = SPEC, web: str = "localhost:0", samples=None) -> tuple[PageSource, Node]:
        node, run = Node(), SimpleNamespace(spec=spec)
        plan = SimpleNamespace(home=Home(tmp_path), run=run, identity=ONE, config=NodeConfig(web=web))
        return PageSource(plan, ledger, log, node, samples), node

    yield make
    log.close()


def test_the_page_has_the_daemon_s_own_watch(source):
    page, node = source()
    node.still = 12.5
    assert page.still_s() == 12.5


def test_a_sample_text_is_the_newest_or_says_that_there_are_none(source):
    assert source()[0].sample().why == "they are off: set sample_every_s in config.toml"
    shown = SampleText(round=3, unix_s=1.0, text="To be")
    assert source(samples=SimpleNamespace(shown=shown))[0].sample() is shown


def test_an_invite_leads_to_this_node(source):
    page, node = source()
    link = page.invite()
    assert page.invite() == link
    short = read_short(link)
    assert short is not None
    assert (short.peer, short.maddrs) == (ONE.peer_id, node.now.addresses[:1])
    seen = read_invite(find_given(page._plan.home, SPEC.id, short.id, time.time()))
    assert (seen.run, seen.signer, seen.token) == (SPEC.id, ONE.peer_id, ())
    assert list(seen.seed_texts) == [f"{node.now.addresses[0]}/p2p/{ONE.peer_id}"]
    node.now = msgspec.structs.replace(node.now, addresses=())
    with pytest.raises(ConfigError, match="no address yet"):
        page.invite()


def test_a_permit_is_never_on_the_page(source):
    """Every user of the machine can read the page."""
    admission = msgspec.structs.replace(SPEC.admission, mode="invite")
    page, _ = source(msgspec.structs.replace(SPEC, admission=admission))
    with pytest.raises(ConfigError, match="is a secret"):
        page.invite()


def test_rounds_before_another_are_those_of_the_log(source):
    page, _ = source()
    assert [row.round for row in page.rounds_before(3)] == [0, 1, 2]


def test_events_of_this_start_and_of_those_before_are_there(tmp_path, ledger, source):
    page, _ = source()
    page._log.event("trouble", error="the disk is full")
    page._log.event("training", round=4)
    count, events = page.event_news(0)
    assert [(one.unix_s, one.event, one.text) for one in events] == [(0.0, "trouble", "error=the disk is full")]
    assert page.event_news(count) == (1, ())
    again, _ = source()
    assert [one.event for one in again.event_news(0)[1]] == ["trouble"]


def test_an_address_that_others_reach_is_not_local(source):
    assert source()[0].is_local
    assert not source(web="0.0.0.0:4780")[0].is_local
