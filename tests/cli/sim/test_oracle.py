"""The oracle says no to homes in which one thing is wrong, and yes to those in which nothing is."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from atoll.cli.sim.homes import read_homes
from atoll.cli.sim.oracle import judge
from atoll.node.config.home import Home
from atoll.node.daemon.telemetry.round_log import RoundLog, TrafficTotals
from atoll.node.worker.error_feedback import LOST_FEEDBACK
from atoll.p2p.ledger.store import LEDGER_FILE, Ledger
from atoll.p2p.membership.reputation import BANNED
from atoll.p2p.system.key_file import store
from atoll.protocols.errors import ConfigError
from atoll.protocols.ids import Round, digest
from atoll.protocols.ledger.records import (
    Ack,
    Contribution,
    Epoch,
    ExcludingProposal,
    Proposal,
    Vote,
    set_digest,
    sign_entry,
)
from atoll.protocols.run.run_spec import sign_run
from atoll_bench.experts.experts_ledger import _Feeds
from atoll_bench.experts.experts_members import Members, identity_of, seed_of
from tests.node.worker.session_home import SPEC

torch.set_num_threads(1)
RUN = replace(SPEC, owner=identity_of(0).peer_id)
FINALS = 3
NOTHING_MOVED = TrafficTotals(0, 0, 0, 0, 0)


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """Two nodes with three final rounds, and work of node 0 in an open one."""
    folder = tmp_path_factory.mktemp("members")
    members = Members(folder / "runs", RUN, 2)
    (folder / "runs").mkdir()
    for at in range(FINALS):
        sent = [members.contribute(number, at, b"") for number in range(2)]
        assert len(members.finalize(at, sent)) == 1
    feeds = _Feeds(RUN, members.peers)
    feeds.begin(FINALS)
    feeds.say(*members.contribute(0, FINALS, b"").body(FINALS))
    feeds.spread()
    for number in range(2):
        home = Home(folder / "homes" / f"node-{number}")
        home.make()
        store(home.identity, seed_of(number))
        home.run_file("session").write_bytes(sign_run(RUN, identity_of(0)))
        shutil.copytree(members.home(number), home.run(RUN.id))
        write_rows(home)
    return folder / "homes"


@pytest.fixture
def homes(sound, tmp_path) -> Path:
    """A copy, to be spoilt."""
    return shutil.copytree(sound, tmp_path / "homes")


def run_of(homes: Path, number: int) -> Path:
    return Home(homes / f"node-{number}").run(RUN.id)


def ledger_of(homes: Path, number: int) -> Ledger:
    return Ledger(run_of(homes, number) / LEDGER_FILE, RUN.id)


def log_of(run_folder: Path, number: int) -> RoundLog:
    return RoundLog(run_folder, identity_of(number).peer_id, lambda: 0.0)


def write_rows(home: Home) -> None:
    """The rows that a daemon would have written."""
    ledger = Ledger(home.run(RUN.id) / LEDGER_FILE, RUN.id)
    log = log_of(home.run(RUN.id), int(home.root.name[-1]))
    for at in range(FINALS):
        (proposal,) = ledger.entries(kind=Proposal, number=at)
        names = list(proposal.body.contributions)
        authors = [ledger.get(name).author for name in names]
        log.closed(Round(at), set_digest(names), proposal.body.state, authors, NOTHING_MOVED)
        log.folded(Round(at), proposal.body.state)
        log.finalized(Round(at), set_digest(names), proposal.body.state, authors)
    log.close()
    ledger.close()


def rewrite(homes: Path, number: int, change) -> None:
    """Replace each row of a node's log by what `change` makes of it; None: left out."""
    path = run_of(homes, number) / "rounds.jsonl"
    rows = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows if row is not None))


def without(homes: Path, number: int, is_gone) -> None:
    """Take entries out of a node's ledger: those of a feed after one that is gone, too."""
    ledger = ledger_of(homes, number)
    entries = [entry for _, entry in ledger.since(0, 1 << 30)]
    ledger.close()
    for path in run_of(homes, number).glob(f"{LEDGER_FILE}*"):
        path.unlink()
    ledger, gone = ledger_of(homes, number), set()
    for entry in entries:
        gone |= {entry.author} if is_gone(entry) else set()
        if entry.author not in gone:
            ledger.insert_all([entry])
    ledger.close()


def say(homes: Path, author: int, at: int, body) -> None:
    """A further entry of a node, in the ledger of node `at`."""
    ledger, identity = ledger_of(homes, at), identity_of(author)
    ledger.append(identity, body)
    ledger.close()


def promises(homes: Path) -> list[str]:
    return sorted({violation.promise for violation in judge(read_homes(homes)).violations})


def test_sound_homes_pass_and_are_not_changed(homes):
    before = {path: path.read_bytes() for path in homes.rglob("*") if path.is_file()}
    verdict = judge(read_homes(homes))
    assert verdict.violations == []
    assert (verdict.finals, verdict.folds, verdict.contributions) == (FINALS, 2 * FINALS, 2 * FINALS + 1)
    assert {path: path.read_bytes() for path in homes.rglob("*") if path.is_file()} == before


def test_a_folder_without_homes_is_no_verdict(tmp_path):
    with pytest.raises(ConfigError, match="no home"):
        read_homes(tmp_path)


def fork(homes):
    rewrite(homes, 1, lambda row: {**row, "digest": "bb", "own_digest": "bb"} if row["round"] == 1 else row)


def other_set(homes):
    rewrite(homes, 1, lambda row: {**row, "set": "cc"} if row["round"] == 1 else row)


def own_digest(homes):
    rewrite(homes, 1, lambda row: {**row, "own_digest": "bb"} if row["round"] == 1 else row)


def gap(homes):
    rewrite(homes, 0, lambda row: None if row["round"] == 1 else row)


def undone(homes):
    log = log_of(run_of(homes, 0), 0)
    log.rows[1].final = False
    log.closed(Round(1), digest(b"set"), digest(b"state"), [], NOTHING_MOVED)
    log.close()


def weights(homes):
    for number in range(2):
        rewrite(
            homes, number, lambda row: {**row, "digest": "bb", "own_digest": "bb"} if row["round"] == 2 else row
        )


def certificate(homes):
    without(homes, 1, lambda entry: isinstance(entry.body, Vote) and entry.body.round == 1)


def durable(homes):
    without(homes, 0, lambda entry: entry.body.round == FINALS and entry.author == identity_of(0).peer_id)


def two_histories(homes):
    without(homes, 1, lambda entry: entry.body.round == FINALS)
    say(homes, 0, 1, Ack(Round(2), digest(b"set"), digest(b"state")))


def proof(homes):
    ledger, identity = ledger_of(homes, 1), identity_of(0)
    bodies = [Ack(Round(9), digest(text), digest(b"state")) for text in (b"one", b"other")]
    first, second = (sign_entry(RUN.id, identity, 50, digest(b"before"), body) for body in bodies)
    assert ledger.add_proof(first, second)
    ledger.close()


def twice(homes):
    words = (Round(0), digest(b"base"), digest(b"payload"), 1, 1, 1, 1.0)
    say(homes, 1, 1, Contribution(*words))


def payload_gone(homes):
    for path in (run_of(homes, 0) / "spool").glob("*.payload"):
        path.unlink()


def payload_damaged(homes):
    for path in (run_of(homes, 0) / "spool").glob("*.payload"):
        path.write_bytes(path.read_bytes()[:-1] + b"\0\0")


def announced_before_saved(homes):
    newest = max((run_of(homes, 0) / "state").iterdir())
    shutil.rmtree(newest)


def counted_nowhere(homes):
    """The saved state has it in the final set, which lacks it."""
    others = [identity_of(0).peer_id]
    rewrite(homes, 1, lambda row: {**row, "contributors": others} if row["round"] == 1 else row)


def damaged_save(homes):
    path = max((run_of(homes, 1) / "state").iterdir()) / "tensors.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def dropped(homes):
    (run_of(homes, 0) / "worker.log").write_text(f"{LOST_FEEDBACK}\n")


def banned(homes):
    message = f"peer {identity_of(0).peer_id} {BANNED}"
    Home(homes / "node-1").log.write_text(json.dumps({"level": "warning", "message": message}) + "\n")


def excluded(homes):
    """Node 1 has another final proposal of the newest round, which excludes it: the same set, the same state."""
    ledger, newest = ledger_of(homes, 1), Round(FINALS - 1)
    (said,) = ledger.entries(kind=Proposal, number=newest)
    votes = ledger.entries(kind=Vote, number=newest)
    ledger.close()
    numbers = {identity_of(number).peer_id: number for number in range(2)}
    without(homes, 1, lambda entry: isinstance(entry.body, Proposal | Vote) and entry.body.round == newest)
    body, whom = said.body, (identity_of(1).peer_id,)
    body = ExcludingProposal(body.round, body.ballot, body.contributions, body.state, whom)
    say(homes, numbers[said.author], 1, body)
    ledger = ledger_of(homes, 1)
    (other,) = ledger.entries(kind=ExcludingProposal, number=newest)
    ledger.close()
    for vote in votes:
        say(homes, numbers[vote.author], 1, replace(vote.body, proposal=other.id))


@pytest.mark.parametrize(
    ("plant", "promise"),
    [
        (fork, "no forked final rounds"),
        (other_set, "no forked final rounds"),
        (own_digest, "a worker computes the certified digest"),
        (gap, "rounds become final in order"),
        (undone, "what is final stays final"),
        (weights, "saved weights are the final ones"),
        (excluded, "all exclude the same members"),
        (certificate, "the ledger proves what is saved"),
        (durable, "what was given out is durable"),
        (two_histories, "one feed an author"),
        (proof, "no correct node is accused"),
        (twice, "one contribution a round"),
        (payload_gone, "nothing acknowledged is lost"),
        (payload_damaged, "nothing acknowledged is lost"),
        (announced_before_saved, "nothing acknowledged is lost"),
        (counted_nowhere, "nothing acknowledged is lost"),
        (dropped, "nothing acknowledged is lost"),
        (damaged_save, "what is saved can be read"),
        (banned, "no correct node is banned"),
    ],
)
def test_one_planted_violation_is_found(homes, plant, promise):
    plant(homes)
    assert promise in promises(homes)


def test_work_that_missed_its_set_and_is_back_in_the_error_feedback_is_not_lost(homes):
    counted_nowhere(homes)
    other, history = read_homes(homes)
    past = tuple(replace(one, rows=() if one.sent.round == 1 else one.rows) for one in history.saved.past)
    assert judge([other, history._replace(saved=replace(history.saved, past=past))]).violations == []


def test_two_sides_of_a_partition_are_apart_and_no_fork(homes):
    """Node 1 went on alone in an epoch of its own: its rounds differ, and nobody broke a promise by it."""
    without(homes, 1, lambda entry: entry.body.round >= 2)
    say(homes, 1, 1, Epoch(Round(1), b"", (identity_of(1).peer_id,)))
    fork(homes)
    verdict = judge(read_homes(homes))
    assert "no forked final rounds" not in {violation.promise for violation in verdict.violations}
    assert verdict.apart == 1


def test_what_a_node_undoes_when_it_changes_chains_is_no_violation(homes):
    say(homes, 0, 0, Epoch(Round(1), b"", (identity_of(0).peer_id,)))
    undone(homes)
    assert "what is final stays final" not in promises(homes)


def test_what_is_saved_may_be_proven_by_a_vote_of_another_history(homes):
    """Of a member with two histories the node holds one; the vote of the other it fetched by name."""
    first, second = read_homes(homes)
    votes = tuple(entry for entry in second.entries if isinstance(entry.body, Vote) and entry.body.round == 1)
    lacking = second._replace(entries=tuple(entry for entry in second.entries if entry not in votes))
    promise = "the ledger proves what is saved"
    assert promise in {one.promise for one in judge([first, lacking]).violations}
    kept = lacking._replace(orphans=votes, forked=frozenset(vote.author for vote in votes))
    assert promise not in {one.promise for one in judge([first, kept]).violations}
