"""The simulator: equal seeds have equal traces, some seeds keep all promises, the oracle sees what is broken."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from atoll.cli.sim.command import sim
from atoll.node.daemon.consensus import exclusion, voter
from atoll.node.daemon.consensus import machine as finality_machine
from atoll.node.daemon.consensus.chains.epochs import EpochBook
from atoll.node.daemon.rounds import facts, queries
from atoll.protocols.errors import ConfigError
from atoll.protocols.ids import PeerId, Round, digest
from atoll.protocols.ledger.records import Exclude
from atoll_bench.simulator import command
from atoll_bench.simulator.history import History, Row
from atoll_bench.simulator.member import Member
from atoll_bench.simulator.oracle import Verdict, judge
from atoll_bench.simulator.play import LOOK_S, draw, judged_in_time, play, turns_end, verdict_of
from atoll_bench.simulator.world import Setting, World

SCRIPT = "from atoll_bench.simulator.play import *; print(play(draw(3, 8, 12.0)).digest)"
A, B, LIAR = PeerId("peer-a"), PeerId("peer-b"), PeerId("peer-l")


MORE = pytest.mark.slow(slice="test_a_slice_of_seeds_breaks_no_promise")


@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=MORE) for block in (1, 2))])
def test_a_slice_of_seeds_breaks_no_promise(block):
    for seed in range(6 * block, 6 * block + 6):
        result = play(draw(seed, 8, 20.0))
        assert not result.verdict.violations, command.replay_line(seed, 8, 20.0, None)
        assert result.rounds > 5


def test_seed_323_has_final_rounds_soon_after_the_faults():
    """Two liars among just a quorum keep back ballots. Who signed an epoch answered none, so nobody saw it."""
    result = play(draw(323, 30, 20.0))
    assert not result.verdict.violations, command.replay_line(323, 30, 20.0, None)
    assert result.still_rounds < 2


@pytest.mark.parametrize("plan", ["votes", "answers unsigned"])
def test_liars_that_answer_in_turn_are_left_out(plan):
    """Just a quorum is left, two liars among it. Without rule 9 nothing becomes final any more."""
    result = play(replace(draw(1, 14, 8.0, liars=2), plan=plan))
    # They hold up some rounds until the end, so how near finality is by then is a matter of the moment.
    assert not [found for found in result.verdict.violations if "no final round near" not in found]
    assert not result.verdict.outvoted
    assert 2 < result.still_rounds < 15


def test_the_same_seed_gives_the_same_trace_in_every_process():
    traces = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert traces[0] == traces[1]
    assert traces[0].strip() != play(draw(4, 8, 12.0)).digest


def everybody(count, seed=1):
    world = World(Setting(seed=seed, nodes=count, train_s=40.0))
    world.begin()
    world.clock.run(400.0)
    return world


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_all_stop_in_good_order_and_come_back_and_the_run_goes_on(count):
    """All of them left, so nobody was there who could decide the rounds up to the one after."""
    world = everybody(count)
    before = [member.worker.applied for member in world.members]
    assert min(before) > 3
    for number, member in enumerate(world.members):
        world.clock.after(1.0 + 3.0 * number, member.leave)
    world.clock.run(500.0)
    for number, member in enumerate(world.members):
        world.clock.after(1.0 + 3.0 * number, member.boot)
    world.clock.run(1200.0)
    assert min(member.worker.applied for member in world.members) > max(before) + 5


NOW_S = 590.0
"""Then a swarm that stopped after 400 s is behind, and a round of one with no liars could still be open."""


def stopped(monkeypatch, liars):
    """A world of seven in which no ballot is opened any more, and where so many of the first owners lie."""
    world = everybody(7)
    for move in ("propose", "prepare"):
        monkeypatch.setattr(f"atoll.node.daemon.consensus.proposer.{move}", lambda state: (state, []))
    world.clock.run(NOW_S)
    for peer in world.members[0].finality.voters[:liars]:
        world.by_peer[peer].is_liar = True
    return world


def test_a_swarm_that_stopped_gets_no_time_without_liars(monkeypatch):
    world = stopped(monkeypatch, 0)
    assert "no final round near" in judged_in_time(world).violations[-1]
    assert world.clock.now == NOW_S


@pytest.mark.parametrize("liars", [1, 2])
def test_a_swarm_that_stopped_is_found_when_liars_had_their_turns(monkeypatch, liars):
    """A round of 40 s and its grace, twice, then two patiences of 80 s for each liar, and one for who decides."""
    world = stopped(monkeypatch, liars)
    last = max(row.at for member in world.members if not member.is_liar for row in member.rows)
    assert turns_end(world) == pytest.approx(last + 120.0 + (2 * liars + 1) * 80.0, abs=10.0)
    assert "no final round near" in judged_in_time(world).violations[-1]
    assert 0 <= world.clock.now - turns_end(world) < LOOK_S


def test_liars_that_own_the_first_ballots_of_the_last_round_have_their_turns(monkeypatch):
    """Three of them held up round 14 of seed 126 (30 nodes, 20 minutes), and no other: that is no stop."""
    world = stopped(monkeypatch, 2)
    until = turns_end(world)
    monkeypatch.undo()
    assert not judged_in_time(world).violations
    assert NOW_S < world.clock.now < until


@pytest.mark.parametrize("count", [2, 3, 5])
def test_all_are_killed_and_come_back_and_the_run_goes_on(count):
    world = everybody(count)
    before = [member.worker.applied for member in world.members]
    for member in world.members:
        member.crash()
        world.return_later(member, world.rng.uniform(10.0, 60.0))
    world.clock.run(1000.0)
    assert min(member.worker.applied for member in world.members) > max(before) + 4


# --- exclusions -------------------------------------------------------------------------------------


def excluding(count, *writers):
    """A world of which these members want to exclude the last one; member 0 is the run's owner."""
    world = everybody(count)
    for number in writers:
        member = world.members[number]
        member.write(Exclude(Round(member.finality.deciding), world.members[-1].peer, ""))
    world.clock.run(1000.0)
    return world


def excluded_in(world):
    """By member: the rounds whose final proposals exclude somebody."""
    rows = [[row for row in member.rows if row.kind == "final"] for member in world.members]
    return [[row.round for row in each if row.excluded] for each in rows]


@pytest.mark.parametrize("writers", [(0,), (1, 2, 3, 4)])
def test_the_owner_or_enough_votes_exclude_a_member_on_all_nodes(writers):
    world = excluding(6, *writers)
    assert not verdict_of(world).violations
    assert len(set(map(str, excluded_in(world)))) == 1
    assert bool(excluded_in(world)[0]) == (writers != (0,)), "a proposal names whom voters exclude"
    newest = [member.rows[-1] for member in world.members]
    assert all(row.authors == {member.peer for member in world.members[:-1]} for row in newest)
    assert world.members[-1].round.phase.value == "paused"


def test_too_few_votes_exclude_nobody():
    world = excluding(6, 1, 2, 3)
    assert not verdict_of(world).violations
    assert not any(excluded_in(world))
    assert all(len(member.rows[-1].authors) == 6 for member in world.members)


@pytest.mark.parametrize("writers", [(0,), (1, 2, 3, 4)])
def test_the_oracle_finds_work_of_an_excluded_member(monkeypatch, writers):
    for module in (facts, queries):
        monkeypatch.setattr(module, "is_excluded", lambda *_: False)
    monkeypatch.setattr(voter, "names_excluded", lambda *_: False)
    monkeypatch.setattr(EpochBook, "excluded_from", lambda *_: frozenset())
    monkeypatch.setattr("atoll_bench.simulator.removals.Removals.step", lambda _: None)
    monkeypatch.setattr("atoll.node.daemon.consensus.proposer.names_excluded", lambda *_: False)
    assert "which is excluded" in verdict_of(excluding(6, *writers)).violations[0]


def test_the_oracle_finds_an_exclusion_without_enough_votes(monkeypatch):
    monkeypatch.setattr(exclusion, "needed_votes", lambda *_: 3)
    assert "with 3 of 4 votes" in verdict_of(excluding(6, 1, 2, 3)).violations[0]


def test_the_oracle_finds_nodes_that_differ_about_who_is_excluded(monkeypatch):
    real, world = finality_machine.note_excluded, everybody(1)
    odd = world.members[0].peer
    monkeypatch.setattr(
        finality_machine, "note_excluded", lambda state, gone: state if state.me == odd else real(state, gone)
    )
    found = verdict_of(excluding(6, 1, 2, 3, 4)).violations
    assert any("not the same members excluded" in line for line in found)


# --- the command --------------------------------------------------------------------------------


def test_a_failure_prints_the_line_that_replays_it(monkeypatch, capsys):
    result = play(draw(5, 3, 8.0, 0))
    broken = result._replace(verdict=Verdict(violations=["two final sets"]))
    monkeypatch.setattr(command, "play", lambda setting: broken)
    assert not command.simulate_seeds(seed=5, seeds=1, nodes=3, minutes=8.0, liars=0, report_file=None)
    lines = capsys.readouterr().out.splitlines()
    assert "seed 5: two final sets" in lines
    assert "replay: atoll sim --virtual -n 3 --minutes 8 --seed 5 --liars 0" in lines


def test_several_seeds_are_counted(tmp_path):
    file = tmp_path / "report.json"
    assert command.simulate_seeds(seed=1, seeds=2, nodes=3, minutes=8.0, liars=None, report_file=file)
    assert '"seeds": 2' in file.read_text()


@pytest.mark.parametrize(
    ("words", "on_stdout", "in_file"),
    [
        (["--json"], True, False),
        (["-o", "report.json"], False, True),
        (["--json", "--output", "report.json"], True, True),
        (["--json", "report.json"], False, True),  # the older spelling
    ],
)
def test_a_report_is_printed_or_written(tmp_path, monkeypatch, words, on_stdout, in_file):
    monkeypatch.chdir(tmp_path)
    ran = CliRunner().invoke(sim, ["--virtual", "-n", "3", "--minutes", "2", *words])
    assert ran.exit_code == 0
    assert ran.stdout.startswith('{"seeds":1,') == on_stdout
    assert (ran.stdout.count("\n") == 1) or not on_stdout
    assert Path("report.json").exists() == in_file
    if on_stdout and in_file:
        assert json.loads(ran.stdout) == json.loads(Path("report.json").read_text())


@pytest.mark.parametrize("words", [["report.json"], ["--json", "-o", "a.json", "report.json"]])
def test_a_file_without_an_option_is_refused(words):
    ran = CliRunner().invoke(sim, ["--virtual", *words])
    assert (ran.exit_code, "unexpected extra argument (report.json)" in ran.output) == (2, True)


def test_real_nodes_are_few():
    outcome = CliRunner().invoke(sim, ["-n", "17"])
    assert isinstance(outcome.exception, ConfigError)


# --- the oracle ---------------------------------------------------------------------------------


def final(number, name=b"set", epoch=b"", voters=(A, B), at=None, authors=(), excluded=()):
    names = (digest(name),)
    return Row(
        at or float(number), "final", number, epoch, names, digest(b"state", *names), voters=voters,
        authors=frozenset(authors), excluded=excluded,
    )  # fmt: skip


def history(*rows, peer=A, **changes):
    applied = max((row.round for row in rows if row.kind == "final"), default=-1)
    whole = History(
        peer=peer, is_liar=False, is_up=True, chain=(b"",), applied=applied, round=applied + 1,
        is_stranded=False, voting=(A, B), forked=frozenset(), announced=(), rows=list(rows),
    )  # fmt: skip
    return replace(whole, **changes)


def found(*histories, newest=2, goes_on=True):
    return judge(histories, newest, goes_on).violations


def test_a_good_run_has_no_violation():
    rows = [final(number) for number in range(3)]
    assert not found(history(*rows), history(*rows, peer=B))


def test_two_sets_of_one_round_in_one_epoch_are_a_fork():
    one, other = history(final(0)), history(final(0, b"other"), peer=B)
    assert found(one, other, newest=1) == ["round 0: two final sets, at …peer-a and …peer-b"]
    assert not found(one, history(final(0, b"other", epoch=b"e"), peer=B), newest=1), "two chains of a partition"


def test_equal_sets_have_equal_states():
    wrong = final(0)._replace(state=digest(b"bad"))
    assert "two states of one set" in found(history(final(0)), history(wrong, peer=B), newest=1)[0]


def test_all_exclude_the_same_members():
    one, other = history(final(0)), history(final(0, excluded=(LIAR,)), peer=B)
    assert "not the same members excluded" in found(one, other, newest=1)[0]


def test_no_final_set_has_work_of_whom_a_proposal_before_it_excluded():
    everyone, votes = (A, B, LIAR), frozenset({(A, LIAR), (B, LIAR)})
    gone = final(0, authors=everyone, excluded=(LIAR,))
    rows = [gone, final(1, authors=(A, B)), final(2, authors=everyone)]
    assert found(history(*rows, votes_against=votes)) == [
        "round 2 of …peer-a has work of …peer-l, which is excluded"
    ]
    moved = final(1, authors=everyone, epoch=b"e")
    assert not found(history(gone, moved, votes_against=votes), newest=1), "the epoch before may have decided it"
    alone = final(1, authors=(LIAR,))
    assert not found(history(gone, alone, votes_against=votes), newest=1), "else it would never be final"


def test_no_final_set_has_work_of_whom_the_owner_excluded_once_all_voters_knew():
    rows = [final(number, authors=(A, LIAR)) for number in range(2)]
    one, other = ({"peer": peer, "by_owner": {LIAR: ((1, at),)}} for peer, at in ((A, 5.0), (B, 7.0)))
    late = judge([history(*rows, **one), history(*rows, **other)], 1, True, {1: 6.0})
    assert not late.violations, "one of the voters did not know it when the round began"
    known = judge([history(*rows, **one), history(*rows, **other)], 1, True, {1: 8.0})
    assert "round 1 of …peer-a has work of …peer-l" in known.violations[0]


def test_nobody_is_excluded_without_the_votes():
    everyone = (A, B, LIAR)
    rows = [final(0, authors=everyone, excluded=(LIAR,))]
    assert "excludes …peer-l with 1 of 2 votes" in found(history(*rows, votes_against={(A, LIAR)}), newest=1)[0]
    there = [final(0, authors=everyone), final(1, authors=(A, B), excluded=(LIAR,))]
    assert "though it is away" in found(history(*there, votes_against={(A, LIAR), (B, LIAR)}), newest=1)[0]


def test_what_was_final_stays_so_in_its_chain():
    back = history(final(0), Row(1.0, "other_chain", 1), final(0, b"other", epoch=b"e"))
    assert "which its chain keeps" in found(back, newest=1)[0]
    moved = history(final(0), final(1), Row(2.0, "other_chain", 1), final(0), final(1, b"other", epoch=b"e"))
    verdict = judge([moved], 2, True)
    assert (verdict.violations, verdict.undone) == ([], 1)


def test_final_rounds_come_one_after_the_other():
    assert "from final round 0 to 2" in found(history(final(0), final(2)))[0]


def test_a_round_has_one_contribution_of_a_node():
    assert "contributed twice" in found(history(final(0), announced=(0, 0)), newest=1)[0]


def test_nobody_honest_is_blamed():
    blamed = history(final(0), Row(1.0, "accused", 0, peer=B))
    assert "accuses …peer-b" in found(blamed, history(final(0), peer=B), newest=1)[0]
    assert (
        "forked its feed"
        in found(history(final(0), forked=frozenset({B})), history(final(0), peer=B), newest=1)[0]
    )
    liar = history(peer=LIAR, is_liar=True, is_up=False)
    assert not found(history(final(0), Row(1.0, "accused", 0, peer=LIAR)), liar, newest=1)


def test_in_the_end_all_are_in_one_chain_and_rounds_become_final():
    rows = [final(number) for number in range(3)]
    assert "not one chain" in found(history(*rows), history(*rows, peer=B, chain=(b"", b"e")))[0]
    assert "no final round near round 9" in found(history(*rows, round=9), newest=9)[0]
    assert found(history(*rows), goes_on=False) == ["training stopped"]
    assert not found(history(*rows, round=9, is_stranded=True), newest=9), "what it needs died with others"


def test_where_liars_are_a_third_nothing_is_judged():
    one = history(final(0, voters=(A, B, LIAR)), voting=(A, B, LIAR))
    other = history(final(0, b"other", voters=(A, B, LIAR)), peer=B)
    liar = history(peer=LIAR, is_liar=True)
    assert judge([one, other, liar], 1, True).owned == 0
    assert not found(one, other, liar)


def test_a_step_that_sees_nothing_new_would_have_done_nothing(monkeypatch):
    """The finality machine passes over such steps. The trace has every entry that a node writes, and when."""
    seeds = range(6)
    traces = [play(draw(seed, 8, 12.0)).digest for seed in seeds]
    monkeypatch.setattr(finality_machine, "_seen_by_moves", lambda _: [object()])
    monkeypatch.setattr(finality_machine, "_waits_for_votes", lambda _: False)
    monkeypatch.setattr(Member, "_may_move", lambda _, body: True)
    assert [play(draw(seed, 8, 12.0)).digest for seed in seeds] == traces
