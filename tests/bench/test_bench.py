"""`atoll bench`: the judging, the parts, and each bench as quickly as it goes, with real processes."""

import asyncio
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import atoll_bench as bench_package
from atoll.p2p.blobs.store import BlobStore
from atoll.protocols.errors import LocalFault
from atoll.protocols.run.experts import ALL, experts_in
from atoll_bench.blobs.blobs_node import LyingStore
from atoll_bench.calls import calls
from atoll_bench.calls.calls_bare import take_messages, varint
from atoll_bench.child import started
from atoll_bench.command import BENCHES
from atoll_bench.compress import codec_pace as pace
from atoll_bench.compress import compress
from atoll_bench.connections import connections
from atoll_bench.experts import experts_loss
from atoll_bench.experts.experts_arm import spec_of as spec_of_arm
from atoll_bench.experts.experts_plans import plan_of
from atoll_bench.reference_arms.baselines import Point
from atoll_bench.report import Bar, all_reached, paired_ratio, row, unjudged
from atoll_bench.space import Plug, can_shape, command, empty_space, plug_in, space_of


def test_a_bar_is_reached_from_its_own_side():
    assert row("speed", 2.0, "x", Bar(">=", 2)).passed is True
    assert row("speed", 1.99, "x", Bar(">=", 2)).passed is False
    assert row("memory", 250.0, "MB", Bar("<=", 250)).passed is True
    assert row("memory", 251.0, "MB", Bar("<=", 250)).passed is False
    assert row("memory", 251.0, "MB").passed is None


def test_what_is_not_measured_is_not_reached():
    good, missing = row("a", 3.0, "x", Bar(">=", 2)), row("b", None, "x", Bar(">=", 2))
    assert missing.passed is None
    assert all_reached([good, row("c", 1.0, "s")])
    assert not all_reached([good, missing])
    assert not all_reached(unjudged([good]))


def test_ratios_are_of_neighbours_in_time():
    # the machine was three times slower in the second turn, for both
    assert paired_ratio([30.0, 10.0, 33.0], [10.0, 3.3, 11.0]) == pytest.approx(3.0)
    assert paired_ratio([1.0], []) is None


@given(st.lists(st.binary(max_size=300), max_size=8), st.lists(st.integers(1, 50), min_size=1, max_size=10))
def test_messages_survive_any_cut_of_their_bytes(bodies, cuts):
    wire = b"".join(varint(len(body)) + body for body in bodies)
    buffer, taken, at, turn = bytearray(), [], 0, 0
    while at < len(wire):
        step = cuts[turn % len(cuts)]
        buffer += wire[at : at + step]
        taken += list(take_messages(buffer))
        at, turn = at + step, turn + 1
    assert taken == bodies
    assert not buffer


def test_rows_of_calls_say_why_a_rival_is_missing():
    size = calls.SIZES[0]
    rates = {(calls.ATOLL, size): [900.0], (calls.BARE, size): [1000.0]}
    rows = {made.metric.partition(": ")[2]: made for made in calls.rows_of(size, rates, "it is not installed")}
    assert rows["atoll / bare p2pd unary"].value == pytest.approx(0.9)
    assert rows["atoll / bare p2pd unary"].passed is True
    against = rows["atoll / lattica"]
    assert (against.value, against.passed, against.note) == (None, None, "it is not installed")
    assert not all_reached(list(rows.values()))


@pytest.mark.parametrize("count", [1, 4, 7, 1000])
def test_every_connection_has_a_process(count):
    made = connections.shares(count)
    assert sum(made) == count
    assert max(made) - min(made) <= 1


def test_a_liar_sends_as_much_as_it_should_and_nothing_right(tmp_path):
    honest, liar = BlobStore(tmp_path / "a"), LyingStore(tmp_path / "b")
    data = os.urandom(1_500_000)
    blob = honest.add_bytes(data)
    assert liar.add_bytes(data) == blob
    for index in (0, 1):
        assert len(liar.chunk(blob, index)) == len(honest.chunk(blob, index))
        assert liar.chunk(blob, index) != honest.chunk(blob, index)


def shown(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def children() -> list[str]:
    return [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]


def test_a_child_that_dies_is_one_line_with_its_last_words():
    async def main() -> None:
        async with started("atoll_bench.no_such_bench") as child:
            await child.ask("address")

    with pytest.raises(LocalFault, match=r"ended while it did 'address'.*No module named"):
        asyncio.run(main())
    assert children() == []


def test_an_order_that_takes_too_long_is_given_up_and_the_child_ended():
    async def main() -> None:
        async with started("atoll_bench.connections.connections_clients") as child:
            await child.ask("alive", deadline_s=0.001)

    with pytest.raises(LocalFault, match="within 0 s"):
        asyncio.run(main())
    assert children() == []


@pytest.mark.skipif(not can_shape(), reason="links of a given rate need root and tc")
def test_machines_on_the_switch_reach_each_other_and_nobody_else():
    async def main() -> str:
        async with empty_space() as switch, empty_space() as one, empty_space() as other:
            await plug_in(switch, [Plug(one, "10.77.0.1", up_bit_s=1_000_000), Plug(other, "10.77.0.2")])
            probe = "import socket; s = socket.create_server(('10.77.0.2', 4001)); s.settimeout(20); s.accept()"
            dial = "import socket; socket.create_connection(('10.77.0.2', 4001), 20)"
            async with asyncio.TaskGroup() as group:
                group.create_task(command(*space_of(other), sys.executable, "-c", probe))
                await asyncio.sleep(1)
                group.create_task(command(*space_of(one), sys.executable, "-c", dial))
            with pytest.raises(LocalFault, match="unreachable"):
                await command(*space_of(one), sys.executable, "-c", dial.replace("10.77.0.2", "192.0.2.1"))
            return await asyncio.to_thread(shown, *space_of(one), "tc", "qdisc", "show", "dev", "eth0")

    try:
        shaped = asyncio.run(main())
    except LocalFault as fault:
        pytest.skip(f"this kernel makes no such network: {fault}")
    assert "tbf" in shaped
    assert "rate 1Mbit" in shaped
    assert children() == []


def test_unknown_names_and_foreign_options_are_refused(atoll):
    assert atoll("bench", "nonsense").code == 2
    refused = atoll("bench", "calls", "--count", "7")
    assert refused.code == 2
    assert "--count is no option of `bench calls`" in refused.err


def test_help_imports_no_bench():
    heavy = {"libp2p", "trio", "torch", "hivemind", "uvloop"}
    code = f"import atoll_bench.command, sys; print(*{heavy!r} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=os.sep)
    assert ran.stdout.split() == []


def quick(atoll, tmp_path, name: str, *more: str) -> dict[str, dict[str, object]]:
    """Rows of a quick run by metric; nothing is left running, and the file is what DESIGN says."""
    file = tmp_path / "rows.json"
    ran = atoll("bench", name, "--quick", "--output", str(file), *more)
    assert ran.code == 0, ran.err
    assert children() == []
    report = json.loads(file.read_text())
    assert set(report) == {"bench", "machine", "quick", "rows"}
    assert report["bench"] == name
    assert report["machine"]["cores"] == os.cpu_count()
    for made in report["rows"]:
        assert set(made) == {"metric", "value", "unit", "bar", "pass", "note"}
        assert made["pass"] is None
        assert made["metric"] in ran.out
        if made["value"] is None:
            assert made["note"]
    return {made["metric"]: made for made in report["rows"]}


@pytest.mark.network
def test_quick_calls(atoll, tmp_path):
    rows = quick(atoll, tmp_path, "calls")
    assert len(rows) == 10
    for label in ("128 B x 64 in flight", "256 KiB x 16 in flight"):
        assert rows[f"{label}: atoll"]["value"] > 10
        assert rows[f"{label}: bare p2pd unary"]["value"] > 10
        assert rows[f"{label}: atoll / bare p2pd unary"]["bar"] == ">= 0.8"
        assert rows[f"{label}: atoll / lattica"]["bar"] == ">= 2"


@pytest.mark.slow(
    slice=(
        "test_quick_calls, "
        "tests/p2p/blobs/test_blob_exchange.py::test_several_holders_share_the_work, "
        "tests/p2p/blobs/test_blob_exchange.py::test_a_liar_is_blamed_and_the_others_finish"
    )
)
@pytest.mark.network
def test_quick_blobs(atoll, tmp_path):
    rows = quick(atoll, tmp_path, "blobs")
    assert rows["1 holder, 16 MiB, loopback: blob / raw"]["value"] > 0.02
    label = "4 holders at 20 Mbit/s up, 4 MiB"
    assert 0.1 < rows[f"{label}: share of the sum of uplinks"]["value"] < 1.2  # the rates hold: no loopback speed
    assert rows[f"{label}, one lies: only the liar named, share of runs"]["value"] == 1
    assert rows[f"{label}, one lies: digest right, share of runs"]["value"] == 1


@pytest.mark.network
def test_quick_connections(atoll, tmp_path):
    rows = quick(atoll, tmp_path, "connections", "--count", "12")
    assert rows["connections after the rest, node's side"]["value"] == 12
    assert rows["connections after the rest, clients' side"]["value"] == 12
    assert rows["base: p2pd"]["value"] > 1
    assert rows["over the base with calls streams"]["note"].startswith("12 calls streams")


@pytest.mark.slow(slice="test_quick_connections")
@pytest.mark.swarm
@pytest.mark.xdist_group("swarm")
def test_quick_idle(atoll, tmp_path):
    rows = quick(atoll, tmp_path, "idle")
    idle = rows["idle CPU of daemon + p2pd"]
    assert idle["bar"] == "<= 1"
    parts = [rows[f"idle CPU of {part} alone"]["value"] for part in ("the daemon", "p2pd")]
    assert all(part > 0 for part in parts)
    assert sum(parts) == pytest.approx(idle["value"])


def test_quick_compress(atoll, tmp_path):
    rows = quick(atoll, tmp_path, "compress")
    assert rows["wire"]["value"] == pytest.approx(82 / 4096, rel=1e-3)
    assert rows["wire: published"]["value"] == pytest.approx(0.0391, rel=1e-2)
    assert rows["encode: ours / memcpy"]["bar"] == "<= 3.5"
    assert rows["decode + fold of 8: published / ours"]["value"] > 0.5
    gpu = {metric: made for metric, made in rows.items() if metric.startswith("GPU")}
    assert [made["bar"] for made in gpu.values()] == ["<= 0", "<= 2.8", ">= 5"]
    assert all(made["value"] is None and made["note"].startswith("not measured: no GPU") for made in gpu.values())


def test_rows_of_a_gpu_are_judged_where_there_is_one_and_not_reached_where_there_is_none():
    seconds = {"encode": [2.0], "encode published": [20.0], "encode: memcpy": [1.0], "fold": [2.0]}
    rows = compress.gpu_rows_of(pace.Paces(seconds=seconds), 4096, 4096)
    judged = {made.metric: made.passed for made in rows if made.bar}
    assert judged == dict.fromkeys(judged, True)
    missing = compress.unmeasured_gpu_rows()
    assert [made.metric for made in missing] == list(judged)
    assert not all_reached(missing)
    other = compress.gpu_rows_of(pace.Paces(seconds=seconds, differs=["payload"]), 4096, 4096)
    assert not all_reached(other)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
@pytest.mark.parametrize("name", ["compress", "step", "slices", "convergence"])
def test_a_bench_on_a_gpu_that_is_not_there_is_a_line(atoll, name):
    ran = atoll("bench", name, "--quick", "--device", "cuda")
    assert ran.code == 78
    assert "no CUDA device" in ran.err or "no triton" in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.slow(
    slice=(
        "test_quick_compress, "
        "tests/node/learning/inner/test_passes.py::test_gradients_of_passes_are_those_of_the_whole_step"
    )
)
def test_quick_step(atoll, tmp_path):
    rows = quick(atoll, tmp_path, "step")
    differences = [row["value"] for name, row in rows.items() if "difference to the whole" in name]
    assert len(differences) == 4
    assert all(0 < value <= 1e-6 for value in differences), "some sums are in another order, and not more"
    assert all(row["value"] > 0 for row in rows.values())


@pytest.mark.slow(
    slice=(
        "tests/bench/test_topology.py::test_a_reduced_round_costs_what_two_transfers_cost, "
        "tests/bench/test_topology.py::test_a_reducer_that_dies_costs_its_slice_and_nobody_disagrees, "
        "tests/bench/test_topology.py::test_a_reducer_that_lies_is_caught_and_then_all_agree_again"
    )
)
def test_quick_topology(atoll, tmp_path):
    rows = quick(atoll, tmp_path, "topology")
    assert rows["all-gather, R = 8"]["value"] > 2 * rows["all-gather, R = 4"]["value"]
    # So few members would never reduce: openings, of which each round has as many, are most of their bytes.
    assert rows["reduce-scatter, R = 8"]["value"] < 1.2 * rows["reduce-scatter, R = 4"]["value"]
    spread = rows["reduce-scatter: largest / smallest over R"]
    assert spread["value"] >= 1 + rows["reduce-scatter: furthest from its mean over R"]["value"]
    assert spread["bar"] is None
    assert rows["digests after each round, most"]["value"] == 1
    assert rows["R = 8, a reducer dies: slices folded raw"]["value"] == 1
    assert rows["R = 8, a reducer lies: members with a checked proof"]["bar"] == ">= 1"
    assert rows["R = 8, a reducer lies: digests, any round"]["value"] == 1


@pytest.mark.slow(
    slice=(
        "tests/bench/test_bench_byzantine.py::test_a_liar_costs_the_mean_more_than_the_rule, "
        "tests/bench/test_bench_byzantine.py::test_rows_are_judged_against_the_mean_without_liars"
    )
)
def test_quick_byzantine(atoll, tmp_path):
    rows = quick(atoll, tmp_path, "byzantine", "--rules", "mean,nnm")
    assert rows["mean: no attack"]["value"] == 1
    assert {"nnm: worst at 20 %", "nnm: worst at 30 %", "nnm: fold of 8 / mean"} <= set(rows)
    assert rows["nnm: worst at 20 %"]["bar"] == "<= 1.03"
    assert rows["nnm: fold of 8 / mean"]["value"] > 0.5


@pytest.mark.slow(slice="tests/bench/test_bench_heal.py::test_own_payloads_return")
def test_quick_heal(atoll, tmp_path):
    rows = quick(atoll, tmp_path, "heal")
    assert rows["β 0.95, 1 rounds, 70/30: returned as a mean"]["bar"] == "<= 0"
    assert rows["β 0.95, 1 rounds, 70/30: begins anew"]["bar"] is None


@pytest.mark.slow(
    slice=(
        "tests/bench/test_experts_trial.py::test_a_trial_has_the_state_of_members_that_are_workers, "
        "test_who_dies_gives_its_experts_away_and_gets_its_number_of_them_back"
    )
)
def test_quick_experts(atoll, tmp_path):
    rows = quick(atoll, tmp_path, "experts")
    held = {m: r["value"] for m, r in rows.items() if m.endswith("distance from 16·T + b·F")}
    assert len(held) == 4
    assert all(0 <= value < 0.1 for value in held.values())
    assert 0.3 < rows["upload of a round, largest share / all"]["value"] < 0.5
    assert rows["the same over (S + E·P/N) / (S + E·P)"]["bar"] == "<= 1.05"
    assert rows["digests after the round"]["value"] == 1
    assert [rows[f"resume 4 -> {count}: values that differ"]["value"] for count in (1, 2, 3, 8)] == [0] * 4
    assert rows["export: largest difference of a logit in transformers"]["value"] < 1e-4
    assert rows["time of a mixture's forward and backward, share / all"]["bar"] == "<= 0.85"
    dying = [made for metric, made in rows.items() if metric.startswith("an owner dies")]
    assert [(made["value"], made["bar"]) for made in dying] == [(None, "<= 0")] * 8
    assert rows["GPU: a share trains inside the cap and all experts do not"]["value"] is None
    assert rows["GPU: cap"]["note"] == "not measured: no GPU here (--device cuda)"
    losses = {metric: made for metric, made in rows.items() if metric.startswith("loss")}
    assert len(losses) == 4
    assert {made["note"] for made in losses.values()} == {"not measured: --loss takes an hour"}
    assert [made["bar"] for made in losses.values()] == ["<= 1.02", "<= 1.02", None, None]
    assert all(made["value"] is None for made in losses.values())


def test_the_judged_arms_are_held_against_the_mixture_that_is_trained_whole():
    def curve(*val_bpb: float) -> list[Point]:
        return [Point(number, 100 * number, 1.0, value, 1.0) for number, value in enumerate(val_bpb)]

    curves = {"whole": curve(3, 2.0), "shared": curve(3, 2.05), "merged": curve(3, 2.02), "lost": curve(3, 4)}
    rows = {made.metric: made for made in experts_loss.rows_of(curves)}
    assert rows["loss, all experts by all members"].note == "round 1: 3.000, round 2: 2.000"
    judged = [rows[f"loss, {experts_loss.ARMS[name]} / whole"] for name in ("shared", "merged", "lost")]
    assert [(made.value, made.passed) for made in judged] == [(1.025, False), (1.01, True), (2.0, None)]


def test_a_bench_that_trained_no_arm_has_reached_no_bar_of_the_loss():
    curve = [Point(0, 100, 1.0, 2.0, 1.0)]
    measured = experts_loss.rows_of(dict.fromkeys(experts_loss.ARMS, curve))
    missing = experts_loss.unmeasured_rows()
    assert {made.metric for made in missing} == {made.metric for made in measured if made.unit == "x"}
    assert all_reached(measured)
    assert not all_reached(missing)


def test_who_dies_gives_its_experts_away_and_gets_its_number_of_them_back():
    spec = spec_of_arm("killed", "moe-smoke", 12, 1, 1)
    plan = plan_of(spec, "killed")
    owned = [{slot: experts_in(bits, 8) for slot, bits in plan(number).items()} for number in range(12)]
    assert all(sorted(e for each in shares.values() for e in each) == list(range(8)) for shares in owned)
    assert [len(shares) for shares in owned] == [4] * 4 + [3] * 5 + [4] * 3
    kept = [owned[4][slot] >= owned[3][slot] for slot in range(3)]
    assert all(kept), "only the experts of the dead move"
    assert len(owned[-1][3]) == 2
    whole = plan_of(spec_of_arm("whole", "moe-smoke", 12, 1, 1), "whole")
    assert dict(whole(5)) == dict.fromkeys(range(4), ALL)
    lost = plan_of(spec_of_arm("lost", "moe-smoke", 12, 1, 1), "lost")
    assert [len(lost(number)) for number in (3, 4, 11)] == [4, 3, 3]


@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_is_where_the_command_looks_for_it(name):
    """Its rivals and its GPU may be missing: importing it needs neither."""
    assert callable(importlib.import_module(f"atoll_bench.{name}.{name}").measure)


def test_every_child_that_a_bench_starts_is_a_module():
    named = {
        found
        for path in Path(bench_package.__file__).parent.rglob("*.py")
        if not path.name.startswith("test_")
        for found in re.findall(r'"(atoll_bench\.[a-z_.]+)"', path.read_text(encoding="utf-8"))
    }
    assert len(named) > 5
    assert [module for module in sorted(named) if importlib.util.find_spec(module) is None] == []
