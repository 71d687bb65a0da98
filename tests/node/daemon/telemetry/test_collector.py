"""The collector: what the worker says, what the round machine is in, and the round's row, put together."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from atoll.node.daemon.rounds.machine import begin
from atoll.node.daemon.rounds.participants import MemberView
from atoll.node.daemon.rounds.state import Phase, RoundConfig
from atoll.node.daemon.telemetry import collector as module
from atoll.node.daemon.telemetry.collector import MEMBERS_S, NAMED, GoodputCollector
from atoll.node.daemon.telemetry.round_log import RoundLog
from atoll.protocols.ids import PeerId, Round, digest
from atoll.protocols.local.time_spent import TimeSpent
from atoll.protocols.local.worker_messages import Pending, TrainReply

S = 10**9
ME, YOU = PeerId("me"), PeerId("you")


class Rig:
    """One node: its clock, round state and upload counter are set by hand."""

    def __init__(self, folder: Path) -> None:
        self.now, self.up_bytes = 50.0, 0
        members = {YOU: MemberView("training", Round(0), 0.0)}
        self.state = replace(begin(RoundConfig(ME, 50, 128, 256, 20.0)), members=members)
        self.log = RoundLog(folder, ME, lambda: 0.0)
        self.keeper = GoodputCollector(self.log, lambda: self.now, lambda: self.state, lambda: self.up_bytes)

    def enter(self, phase: Phase) -> None:
        self.state = replace(self.state, phase=phase)
        self.keeper.sample()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    one = Rig(tmp_path)
    yield one
    one.log.close()


def test_a_round_from_its_training_to_the_next_ones(rig):
    rig.now = 53.0
    rig.keeper.on_spent(TimeSpent(start_ns=2 * S))
    rig.log.training_started(Round(0))
    rig.enter(Phase.TRAIN)
    rig.now = 63.0
    rig.keeper.on_spent(TimeSpent(start_ns=2 * S, steps_ns=9 * S, encode_ns=1 * S))
    pending = Pending(Round(0), digest(b"b"), digest(b"p"), "/p", 5, 640, 64, 2.5)
    rig.log.trained(TrainReply(pending, 1000, 9.0), 0)
    rig.enter(Phase.COLLECT)
    rig.now, rig.up_bytes = 66.0, 1000
    rig.keeper.sample()
    rig.now = 67.0
    rig.enter(Phase.FOLD)
    rig.now = 69.0
    rig.keeper.on_spent(TimeSpent(start_ns=2 * S, steps_ns=9 * S, encode_ns=1 * S, wait_ns=4 * S, fold_ns=2 * S))
    rig.log.training_started(Round(1))
    row = rig.log.rows[0]
    assert (row.steps_s, row.encode_s, row.transfer_s, row.wait_s, row.fold_s) == (9.0, 1.0, 3.0, 1.0, 2.0)
    total = rig.keeper.report().total
    assert (total.start_s, total.down_s, total.transfer_s) == (2.0, 1.0, 3.0)


def test_a_worker_that_dies_in_a_round(rig):
    rig.keeper.on_spent(TimeSpent())
    rig.log.training_started(Round(0))
    rig.now = 56.0
    rig.keeper.on_spent(TimeSpent(steps_ns=6 * S, unsaved_ns=6 * S))
    rig.keeper.on_worker_gone()
    rig.now = 60.0
    rig.keeper.on_spent(TimeSpent(start_ns=1 * S))
    rig.log.training_started(Round(0))
    rig.now = 68.0
    rig.keeper.on_spent(TimeSpent(start_ns=1 * S, steps_ns=8 * S))
    row = rig.log.rows[0]
    assert (row.recompute_s, row.down_s, row.start_s, row.steps_s) == (6.0, 3.0, 1.0, 8.0)
    assert rig.keeper.report().window_s == 18.0


async def test_it_looks_by_itself(rig, monkeypatch):
    monkeypatch.setattr(module, "SAMPLE_S", 0.0)
    rig.keeper.on_spent(TimeSpent())
    rig.log.newest_payload = (0, 1000)
    rig.state = replace(rig.state, phase=Phase.COLLECT)
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(rig.keeper.serve())
        await asyncio.sleep(0)
        serving.cancel()
    rig.now += 5.0
    rig.keeper.on_spent(TimeSpent(wait_ns=5 * S))
    assert rig.keeper.report().total.transfer_s == 5.0


def test_members_that_come_and_go_are_journalled(rig, tmp_path):
    def told() -> list[tuple[str, list[str], int]]:
        found = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
        return [(one["event"], one["peers"], one["count"]) for one in found]

    watch, view = module.MemberWatch(rig.log), MemberView("training", Round(0), 0.0)
    watch.see({}, 50.0)
    watch.see({YOU: replace(view, untried=True)}, 50.0)
    assert told() == []
    watch.see({YOU: view}, 50.0)
    assert told() == [("joined", [YOU], 1)]
    many = {PeerId(f"p{number:03}"): view for number in range(100)}
    watch.see(many, 50.0 + MEMBERS_S / 2)
    assert len(told()) == 1, "leases of many identities must not fill the journal"
    watch.see(many, 50.0 + MEMBERS_S)
    assert told()[1:] == [("joined", sorted(many)[:NAMED], 100), ("left", [YOU], 1)]
    watch.see(many, 50.0 + 3 * MEMBERS_S)
    assert len(told()) == 3
