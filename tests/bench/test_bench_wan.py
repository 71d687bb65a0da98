"""`atoll bench wan`: its arithmetic, and two nodes and two averagers on slow links where the lab can run."""

import json

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocols.errors import LocalFault
from atoll.protocols.identity import Identity
from atoll_bench.report import all_reached
from atoll_bench.wan import wan
from atoll_bench.wan.wan_figures import Exchange, Trace, elsewhere, exchanges, goodput
from atoll_bench.wan.wan_nodes import Trained, spec_of
from atoll_bench.wan.wan_rival import Averaged, agree
from atoll_lab.capability import missing


def node(peer, plan, *, together=2, missed=(), lost_s=0.0):
    """A trace from (start, end of training, fold) of each round; it encodes for 0.25 s after the last step."""
    rows, events = [], []
    for number, (start, end, fold) in enumerate(plan):
        counted = [] if number in missed else [peer]
        times = {"train_s": end - start, "steps_s": end - start - lost_s, "encode_s": 0.25, "wait_s": lost_s}
        rows.append({"round": number, "contributors": ["else", *counted], **times})
        events.append({"event": "training", "round": number, "time": start})
        events.append({"event": "trained", "round": number, "time": end + 0.25, "steps": 8})
        events.append({"event": "closed", "round": number, "time": fold, "contributors": together})
    return Trace(peer, rows, sorted(events, key=lambda event: event["time"]))


EVEN = [(0.0, 3.0, 4.0), (4.0, 7.0, 8.0), (8.0, 11.0, 12.0)]


def test_goodput_is_the_share_of_wall_time_in_steps_that_counted():
    assert goodput(node("a", EVEN), 0, 2) == pytest.approx(6 / 8)
    assert goodput(node("a", EVEN), 1, 2) == pytest.approx(3 / 4)
    assert goodput(node("a", EVEN, missed=[1]), 0, 2) == pytest.approx(3 / 8)
    assert goodput(node("a", EVEN, lost_s=1.0), 0, 2) == pytest.approx(4 / 8)


def test_the_rest_of_the_time_has_names():
    # 2 steps and 1 wait of 3.25 s a round, 0.25 of it in the encoder
    assert elsewhere([node("a", EVEN, lost_s=1.0)], 0, 2) == "wait 30.8, encode 7.7"


def test_goodput_without_a_start_is_not_measured():
    assert goodput(node("a", EVEN), 0, 3) is None


def test_overlap_may_start_a_round_before_the_fold_of_the_last():
    back_to_back = [(0.0, 3.0, 4.5), (3.25, 6.25, 7.75), (6.5, 9.5, 11.0)]
    assert goodput(node("a", back_to_back), 0, 2) == pytest.approx(6 / 6.5)
    assert [one.own_s for one in exchanges([node("a", back_to_back, together=1)], 0, 2)] == [1.5, 1.5]


def test_an_exchange_is_counted_from_the_own_and_from_the_last_end():
    slow = node("b", [(0.0, 3.5, 4.25), (4.25, 7.0, 8.0)])
    assert exchanges([node("a", EVEN), slow], 0, 1) == [Exchange(1.0, 0.5), Exchange(0.75, 0.75)]


def test_a_fold_without_somebody_ends_no_exchange():
    traces = [node("a", EVEN, together=1), node("b", EVEN)]
    assert exchanges(traces, 0, 1) == [Exchange(1.0, 1.0)]
    a = traces[0]
    late = Trace("a", a.rows, [*a.events, {"event": "closed", "round": 0, "time": 5.0, "contributors": 2}])
    assert exchanges([late, traces[1]], 0, 1) == [Exchange(2.0, 2.0), Exchange(1.0, 1.0)]
    lazy = Trace("b", [], [])
    assert exchanges([a, lazy], 0, 3) == []


@given(st.lists(st.tuples(*[st.floats(0.01, 9.0)] * 3), min_size=2, max_size=6))
def test_without_overlap_goodput_is_below_one_and_exchanges_are_positive(spans):
    plan, now = [], 0.0
    for train_s, exchange_s, pause_s in spans:
        plan.append((now, now + train_s, now + train_s + 0.25 + exchange_s))
        now += train_s + 0.25 + exchange_s + pause_s
    trace = node("a", plan, together=1)
    assert 0 < goodput(trace, 0, len(spans) - 1) < 1
    assert all(one.own_s == one.last_s > 0 for one in exchanges([trace], 0, len(spans)))


def rows_with(rival):
    plan = wan.Plan(2, "tiny", 2, 4, 2, ["float16"])
    traces = [node("a", [(t * 4.0, t * 4.0 + 3.9, t * 4.0 + 4.0) for t in range(8)])]
    arm = Trained([*traces, traces[0]], 2e6)
    made = wan.rows_of(plan, {wan.PLAIN: arm, wan.OVERLAPPED: arm}, {"float16": rival})
    return {row.metric: row for row in made}, made


def test_rows_are_judged():
    rows, made = rows_with(Averaged([2.0, 9.0, 2.5], [0.4, 0.6, 0.5], [5e6]))
    assert rows["2 nodes, tiny, overlap: goodput"].value == pytest.approx(3.9 / 4)
    assert rows["2 nodes, tiny, overlap: goodput"].passed is True
    assert rows["2 nodes, tiny, no overlap: goodput"].passed is None
    assert rows["hivemind step() / our exchange"].value == pytest.approx(25)
    assert rows["hivemind all-reduce / our exchange"].value == pytest.approx(5)
    assert rows["hivemind, float16: bytes on a node's link per step"].value == 5
    assert all_reached([row for row in made if row.metric != "hivemind all-reduce / our exchange"])


def test_a_rival_that_never_averaged_reaches_no_bar():
    rows, made = rows_with(Averaged(failures=3))
    against = rows["hivemind all-reduce / our exchange"]
    assert (against.value, against.passed) == (None, None)
    assert rows["hivemind, float16: step(), matchmaking included"].note == "3 steps failed: a peer was lost"
    assert not all_reached(made)


def test_averages_that_differ_are_no_averages():
    agree([[0.5, 0.25], [0.5, 0.2501]])
    with pytest.raises(LocalFault, match=r"differ by 0\.5"):
        agree([[0.5, 0.25], [1.0, 0.25]])


def test_the_run_is_the_presets_but_for_its_length_and_company():
    spec = spec_of("10m", Identity(bytes(32)), 3, 7, 5)
    assert (spec.steps(0), spec.outer.rounds, spec.pace.min_members) == (15, 7, 3)
    assert spec.outer.overlap_bounds == (2, 5)
    assert spec_of("10m", Identity(bytes(32)), 3, 7, 3).outer.overlap_bounds == (3, 3)
    assert spec_of("10m", Identity(bytes(32)), 3, 7, 0).outer.overlap_bounds == (0, 0)
    assert spec.inner.batch == 16


def test_where_the_lab_cannot_run_it_is_said_and_nothing_passes(atoll, monkeypatch):
    monkeypatch.setattr(wan, "missing", lambda: "THE LAB CANNOT RUN HERE: not root")
    ran = atoll("bench", "wan", "--quick")
    assert ran.code == 1
    assert ran.err == "error: NOT MEASURED. THE LAB CANNOT RUN HERE: not root\n"
    assert ran.out == ""


@pytest.mark.slow(
    slice=(
        "test_rows_are_judged, "
        "tests/bench/test_bench.py::test_machines_on_the_switch_reach_each_other_and_nobody_else"
    )
)
@pytest.mark.swarm
def test_two_nodes_and_two_averagers_on_slow_links(atoll, tmp_path, monkeypatch):
    monkeypatch.setattr(wan, "SKIPPED", 1)
    if (lack := missing()) is not None:
        pytest.skip(lack)
    ran = atoll("bench", "wan", "--quick", "--nodes", "2", "--rounds", "1", "-o", str(tmp_path / "rows.json"))
    assert ran.code == 0, ran.err
    assert psutil.Process().children(recursive=True) == []
    rows = {row["metric"]: row for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    for arm in ("no overlap", "overlap"):
        assert 0.05 < rows[f"2 nodes, tiny, {arm}: goodput"]["value"] <= 1.0
        assert rows[f"2 nodes, tiny, {arm}: exchange, from the last node's last step"]["value"] > 0.03
    # a round trip, and half of the float16 values both ways at 20 Mbit/s
    assert rows["hivemind, float16: all-reduce alone"]["value"] > 0.06 + 0.5 * 2 * 600_000 * 8 / 20e6
    assert rows["hivemind, float16: bytes on a node's link per step"]["value"] > 2.0
