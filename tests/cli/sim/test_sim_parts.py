"""The story and the verdict of `atoll sim`: pure parts. The verdict must be able to say no."""

import io
import subprocess
import sys
from dataclasses import replace

import pytest

from atoll.cli.formatting import sent_line
from atoll.cli.sim import verdict
from atoll.cli.sim.nodes import SimNode, kept_environment
from atoll.cli.sim.progress import EVERY_S, Progress
from atoll.cli.sim.report import as_json, sent
from atoll.cli.sim.scenario import Join, Kill, Seen, Story, plan
from atoll.cli.sim.simulation import simulate
from atoll.cli.sim.swarm import prepare
from atoll.cli.sim.verdict import (
    Validation,
    by_round,
    newest_validation,
    share_of,
    tokens_used,
)
from atoll.protocols.errors import ConfigError
from atoll.protocols.local.control_messages import TimeShares


def row(
    number: int,
    digest: str = "aa",
    *,
    own: str | None = None,
    final: bool = True,
    contributors: tuple[str, ...] = ("p",),
) -> dict[str, object]:
    """A row of a worker that folded to the certified digest, unless `own` says otherwise."""
    own_digest = (digest if final else "") if own is None else own
    return {
        "round": number,
        "digest": digest,
        "own_digest": own_digest,
        "final": final,
        "contributors": list(contributors),
    }


@pytest.mark.parametrize("seed", range(50))
def test_a_story_fits_its_rounds(seed):
    story = plan(4, 20, seed, kill=True, late_join=True)
    (kill,) = story.kills
    (join,) = story.joins
    assert 1 <= kill.at_round < kill.at_round + kill.away < story.hold_at == 15
    assert 0 <= kill.node < 4
    assert (join.node, join.at_round) == (4, 10)
    assert story == plan(4, 20, seed, kill=True, late_join=True)


STORY = Story(3, (Kill(node=1, at_round=4, away=2, delay_s=0.0),), (Join(node=3, at_round=10),), hold_at=15)


def test_a_killed_node_comes_back_when_final_rounds_lack_it():
    assert STORY.to_kill(Seen(reached=3)) == []
    assert STORY.to_kill(Seen(reached=6)) == list(STORY.kills)
    killed = Seen(reached=6, killed={1: 6}, final={5: {0, 2}, 6: {0, 2}, 7: {0, 1, 2}, 8: {0, 2}})
    assert STORY.to_kill(killed) == []
    assert STORY.to_start(killed) == [], "one round after the kill lacks it"
    lacking = replace(killed, final={**killed.final, 9: {0, 2}})
    assert STORY.to_start(lacking) == [1]
    assert STORY.to_start(replace(lacking, started={1: 9})) == []
    assert STORY.to_start(replace(killed, reached=15)) == [3, 1], "rounds that end late must not use up its time"


def test_the_swarm_waits_for_a_node_that_loads_while_there_are_rounds_left_for_it():
    started = Seen(reached=14, started={1: 9})
    assert not STORY.must_hold(started, [1])
    assert STORY.must_hold(replace(started, reached=15), [1])
    assert not STORY.must_hold(replace(started, reached=15), []), "it is ready"
    assert not STORY.must_hold(Seen(reached=15, killed={1: 6}), [1]), "it was not started: it is not on its way"


def test_seeds_choose_different_victims():
    assert {plan(4, 20, seed, kill=True, late_join=False).kills[0].node for seed in range(40)} == {0, 1, 2, 3}


def test_only_folds_of_workers_are_counted():
    adopted = row(0, own="")
    found = verdict.all_folded(by_round({0: [row(0)], 1: [row(0)], 2: [adopted]}), 1)
    assert found.ok
    assert "2 folds of workers, 1 rounds adopted" in found.seen
    assert not verdict.all_folded(by_round({0: [adopted], 1: [adopted]}), 1).ok, "nobody computed it"
    assert not verdict.all_folded(by_round({0: [row(0, final=False, own="aa")]}), 1).ok, "it is not final"


def test_a_round_that_nobody_made_final_is_seen():
    assert not verdict.all_folded(by_round({0: [row(0)]}), 2).ok


def test_a_node_that_stayed_behind_is_seen():
    assert not verdict.all_finished({0: [row(0), row(1)], 1: [row(0)]}, 2).ok


def test_a_node_that_never_contributed_again_is_seen():
    rows = [row(0, contributors=("p", "q")), row(1), row(2)]
    assert verdict.returned(rows, "q", 0).ok
    assert not verdict.returned(rows, "q", 1).ok
    rows[2] = row(2, final=False, contributors=("q",))
    assert not verdict.returned(rows, "q", 1).ok, "the round is not final"


@pytest.mark.parametrize(("sent", "ok"), [(1000, True), (1049, True), (1060, False), (0, False)])
def test_bytes_on_the_wire_are_held_against_the_payloads(sent, ok):
    assert verdict.wire_overhead([{"blob_bytes_up": sent, "blob_payload_up": 1000}]).ok is ok


def test_the_report_says_what_a_round_costs_in_the_words_of_status():
    row = {"digest": "aa", "payload_bytes": 20_000, "blob_bytes_up": 40_120, "blob_payload_up": 40_000}
    rows = {n: [{"round": 0, "peer": str(n), "bytes_up": size, **row}] for n, size in ((0, 41_000), (1, 43_000))}
    seen = sent(rows, 2_226_000 // 4)
    assert sent_line(seen) == "42 kB a round and node: 2.10 payloads, 53 × below fp32 weights; " + (
        "a copy costs 1.003 × the payload"
    )
    assert sent({0: []}, 1) is None
    assert sent_line(None) == "–"


def test_shares_of_time_are_of_all_rounds_of_a_node_but_the_newest():
    empty = {"round": 0, **dict.fromkeys(TimeShares.__struct_fields__, 0.0)}
    first, second = {**empty, "steps_s": 3.0}, {**empty, "wait_s": 4.0, "transfer_s": 2.0, "fold_s": 1.0}
    newest = {**empty, "round": 2, "wait_s": 1e6}
    rows = {0: [newest, first, {**second, "round": 1}], 1: [empty, newest], 2: []}
    assert share_of(rows, "steps") == {"0": 0.3, "1": 0.0, "2": 0.0}
    assert share_of(rows, "wait", "transfer") == {"0": 0.6, "1": 0.0, "2": 0.0}


def test_a_payload_is_far_smaller_than_the_weights():
    assert verdict.compression(1_000_000, 40_000).ok
    assert not verdict.compression(1_000_000, 40_001).ok


def test_the_tokens_of_a_swarm_are_those_of_final_sets():
    def used(peer: str, tokens: int, **more) -> dict[str, object]:
        return {**row(0, contributors=("p", "q"), **more), "peer": peer, "tokens": tokens}

    rows = {0: [used("p", 100), used("p", 7, final=False)], 1: [used("q", 60)], 2: [used("late", 1000)]}
    assert tokens_used(rows) == 160


def test_the_validation_is_of_the_newest_round_that_any_node_validated():
    def validated(*bpbs: float | None) -> list[dict[str, object]]:
        return [{"round": number, "val_bpb": bpb} for number, bpb in enumerate(bpbs)]

    assert newest_validation({0: validated(4.0, None), 1: []}) == Validation(0, 4.0)
    assert newest_validation({0: validated(4.0, None), 1: validated(4.1, 3.5, None)}) == Validation(1, 3.5)
    assert newest_validation({1: validated(3.9), 0: validated(4.0)}) == Validation(0, 4.0)
    assert newest_validation({0: validated(None)}) is None


class Terminal(io.StringIO):
    """An output that can be redrawn."""

    def isatty(self) -> bool:
        return True


def watched(out: io.StringIO) -> list[str]:
    """One phase of 60 s with a look every second, to `out`; the lines that stay."""
    now = [0.0]
    progress = Progress(out, lambda: now[0])
    with progress.phase("rounds"):
        for second in range(60):
            now[0] = float(second)
            progress.update(second / 60, f"round {second}")
            if second == 30:
                progress.note("node 1 joins")
    return out.getvalue().splitlines()


def test_progress_is_a_line_now_and_then_with_the_time_left():
    lines = watched(io.StringIO())
    assert len(lines) == 60 / EVERY_S + 2
    assert lines[0] == "rounds         round 0"
    assert lines[1] == "rounds         round 20  about 40.0 s left"
    assert lines[2] == "node 1 joins"
    assert lines[-1] == "rounds         round 59  took 59.0 s"


def test_progress_on_a_terminal_is_redrawn_in_place():
    out = Terminal()
    watched(out)
    assert out.getvalue().count("\n") == 2
    assert out.getvalue().count("\r") == 62


def test_reference_arms_that_are_not_installed_are_one_line_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    with pytest.raises(ConfigError, match="reference arms") as caught:
        simulate(tmp_path, 1.0, baselines=True)
    assert "make setup" in caught.value.line()


def test_a_busy_machine_is_no_broken_promise(tmp_path):
    swarm = prepare(
        tmp_path, nodes=2, rounds=4, steps=1, seed=1, preset_name="tiny", data="synthetic:markov", late_join=True
    )
    swarm.seconds, swarm.held_s, swarm.cpu_s = 1e4, 1e3, {"daemon": 1e3, "worker": 1e4}
    report = as_json(swarm, {})
    calm = as_json(replace(swarm, seconds=60.0, held_s=0.0, cpu_s={"daemon": 1.0, "worker": 9.0}), {})
    assert report["held_s"] == 1e3
    assert report["checks"] == calm["checks"]


COUNTS_SIGNALS = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("up", flush=True)
signal.sigwait([signal.SIGTERM])
print("told", flush=True)
sys.exit(1 if signal.sigtimedwait([signal.SIGTERM], 1.0) is None else 2)
"""


def test_a_node_that_was_told_to_end_is_not_told_again(tmp_path):
    """A second signal ends a node at once: what only it had is gone, and the others wait for a lease."""
    node = SimNode(0, tmp_path, tmp_path / "sim.run")
    process = subprocess.Popen([sys.executable, "-c", COUNTS_SIGNALS], stdout=subprocess.PIPE, text=True)
    node._process = process
    assert process.stdout.readline() == "up\n"
    node.terminate()
    assert process.stdout.readline() == "told\n"  # two signals at once would be one
    node.stop()
    process.stdout.close()
    assert process.returncode == 1


def test_a_node_keeps_what_python_compiles_as_a_user_s_does() -> None:
    assert kept_environment({"PYTHONDONTWRITEBYTECODE": "1", "HOME": "/h"}) == {"HOME": "/h"}
