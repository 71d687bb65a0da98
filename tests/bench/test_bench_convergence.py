"""`bench convergence`: it trains as workers do, what is stored is not trained again, and the page is true."""

import asyncio
import typing
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from atoll.node.learning.data.dataset import open_dataset
from atoll.node.learning.data.shakespeare import default_cache
from atoll.protocols.errors import ConfigError, DecodeError
from atoll.protocols.ids import Round
from atoll.protocols.local.worker_messages import (
    FinalizeRequest,
    SaveRequest,
    TrainProgress,
    TrainReply,
    TrainRequest,
)
from atoll.protocols.run import run_spec
from atoll.protocols.run.experts import ALL
from atoll.protocols.run.sections.compression import FeedbackName
from atoll_bench.convergence import convergence
from atoll_bench.convergence.arms import SIZES, arm_of, methods, spec_of
from atoll_bench.convergence.page import write_page
from atoll_bench.convergence.parts import Wanted, arms, best_trial, cells, next_arm, trials_of
from atoll_bench.convergence.store import FILE, add_line, line_of, read_lines, reusable
from atoll_bench.convergence.tables import bar_rows, better_diloco, claim_rows, estimate, whole_runs
from atoll_bench.convergence.trial import Point, _Rounds
from atoll_bench.experts.experts_members import Members, identity_of
from atoll_bench.reference_arms.baselines import Task
from tests.waiting import poll

MEMBERS = 2
TEXT = "synthetic:markov?size=262144"


def spec_and_data(method, **more):
    spec = spec_of(arm_of(method, "micro", total=4, seed=1, steps=2, **more))
    # The members of a test have an owner among them, who signs what they agree on.
    spec = replace(spec, owner=identity_of(0).peer_id, data=replace(spec.data, source=TEXT))
    return spec, open_dataset(spec.data, spec.model.context, "", default_cache())


def say_nothing(line):
    pass


def measured(store="", **more):
    return asyncio.run(convergence.measure(False, say_nothing, store=str(store), **more))


# --- what is trained --------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["sgd", "nesterov", "sgd-muon"])
def test_a_trial_has_the_state_of_members_that_are_workers(method, tmp_path):
    spec, data = spec_and_data(method)
    (tmp_path / "trial").mkdir()
    trial = _Rounds(Task(spec, data, MEMBERS, 2), tmp_path / "trial", exact=False)
    members = Members(tmp_path / "workers", spec, MEMBERS)
    for number in range(2):
        trial.round(number)
        states = members.finalize(number, [members.contribute(slot, number, ALL) for slot in range(MEMBERS)])
        assert states == {trial.fold.state_digest()}


def trained(session, ask):
    """A round of a session that stays open, when it is on the disk."""
    *_, reply = session.train(ask)
    poll("a save", lambda: session.finish_save(SaveRequest(ask.round)))
    return reply


def test_an_overlapped_trial_has_the_state_of_workers_whose_fold_comes_late(tmp_path):
    spec, data = spec_and_data("sgd-overlap")
    spec = replace(spec, outer=replace(spec.outer, overlap_steps=1))
    (tmp_path / "trial").mkdir()
    trial = _Rounds(Task(spec, data, MEMBERS, 2), tmp_path / "trial", exact=False)
    trial.round(0)
    trial.round(1)
    members, second = Members(tmp_path / "workers", spec, MEMBERS), []
    with ExitStack() as open_sessions:  # a worker that started again would begin round 1 at the view
        sessions = [open_sessions.enter_context(members.session(slot)) for slot in range(MEMBERS)]
        asks = [TrainRequest(Round(0), slot, MEMBERS, spec.steps(0), -1, ALL) for slot in range(MEMBERS)]
        first = [members.contributed(slot, trained(sessions[slot], ask)) for slot, ask in enumerate(asks)]
        final = FinalizeRequest(Round(0), tuple(each.member for each in first))
        for slot, session in enumerate(sessions):
            ask, folds = replace(asks[slot], round=Round(1), steps=spec.steps(1), after=Round(0), ahead=1), 0
            for event in session.train(ask):
                if event is None:  # one step was taken, and no more may be before the fold
                    session.answer(final)
                    folds += 1
                elif isinstance(event, TrainReply):
                    second.append((slot, event.pending))
                else:
                    assert isinstance(event, TrainProgress)
            assert folds == 1, "the round waited for its fold"
    for slot, pending in second:  # its file is written when the session is saved
        assert (tmp_path / "trial" / f"payload-{slot}").read_bytes() == Path(pending.path).read_bytes()


def test_exact_contributions_move_the_fold_by_their_mean(tmp_path):
    spec, data = spec_and_data("average-float32")
    trial = _Rounds(Task(spec, data, MEMBERS, 2), tmp_path, exact=True)
    before = trial.fold.view_C4096.clone()
    trial.round(0)
    sent = list(trial._sent_exactly.values())
    expected = before.double() - (sent[0].double() + sent[1].double()) / 2 * 2.0**24
    assert len(sent) == MEMBERS
    assert float((trial.fold.view_C4096.double() - expected).abs().max()) <= 0.5
    assert trial.sent_bytes == 4 * spec.model.parameters


def test_every_rule_of_the_product_is_a_method_and_every_method_a_run():
    assert set(typing.get_args(run_spec.Step)) <= methods().keys()
    settings = {setting for method in methods().values() for setting in method.settings}
    rules = set(typing.get_args(FeedbackName)) - {"ef"}  # that of `sgd`, without a setting
    assert {f"compress.feedback_rule={rule}" for rule in rules} <= settings
    wanted = Wanted("micro", 1500, 1)
    for cell in cells(wanted):
        for trial in methods()[cell.method].trials:
            arm = arm_of(cell.method, "micro", total=1500, seed=1, steps=cell.steps, k=cell.k, trial=trial)
            spec = spec_of(arm)
            assert spec.outer.rounds * spec.steps(0) >= 1500
            assert spec.compress.k == (cell.k if methods()[cell.method].sparse else spec.compress.k)
    assert all(spec_of(arm_of("sgd", size, total=15, seed=1)).model.parameters for size in SIZES)


def test_tuned_methods_have_as_many_trials_as_what_they_are_compared_with():
    counts = {name: len(method.trials) for name, method in methods().items() if len(method.trials) > 1}
    main = {"adamw-parallel", "sgd", "nesterov"}
    assert {counts[name] for name in main} == {6}
    # A fifth lies beyond the edge at which the best of four was; never more than those beside them.
    assert {count for name, count in counts.items() if name not in main} == {4, 5}


# --- parts that are ended and taken up again --------------------------------------------------


@pytest.mark.slow(
    slice=(
        "test_a_trial_has_the_state_of_members_that_are_workers, "
        "test_whole_runs_wait_for_their_trials_and_parts_share_what_is_missing"
    )
)
def test_a_quick_run_is_taken_up_from_its_store_and_gives_the_same_bits(tmp_path):
    lines = []
    rows = asyncio.run(convergence.measure(True, lines.append, store=str(tmp_path)))
    stored = read_lines(tmp_path / FILE)
    assert len(lines) == len(stored) > 2
    assert [row.value for row in rows if row.metric.startswith(("adamw-parallel", "sgd H=15 k=64"))] == [
        min(line.val_bpb for line in stored if line.arm.method == method) for method in ("adamw-parallel", "sgd")
    ]
    text = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(text[: text[:-1].rfind(b"\n") + 30])  # a crash cut the last line off
    again = []
    asyncio.run(convergence.measure(True, again.append, store=str(tmp_path)))
    assert len(again) == 1
    new = read_lines(tmp_path / FILE)
    assert [line.key for line in new] == [line.key for line in stored]
    assert new[-1].points == stored[-1].points


def fixed(arm, loss, code="", points=2):
    made = [Point(15 * n, 1000 * n, arm.k * n, 3.0, loss + points - n) for n in range(1, points + 1)]
    line = line_of(arm, made, parameters=57536, cpu_s=1.0, device="cpu")
    return replace(line, code=code or line.code)


WANTED = Wanted("micro", 1500, 2)
MAIN = {"sgd": 3.0, "nesterov": 3.2, "nesterov-float32": 3.1, "adamw-parallel": 2.95, "sgd-overlap": 3.01}


def stored_lines(losses=MAIN, wanted=WANTED):
    found = []
    for method in methods():
        found += [fixed(arm, 3.5 + at) for at, (_, arm) in enumerate(trials_of(method, wanted, {}))]
    for method, loss in losses.items():
        trial = best_trial(method, wanted, {line.arm: line for line in found})
        for seed in (1, 2):
            found.append(fixed(arm_of(method, "micro", total=1500, seed=seed, trial=trial), loss + 0.01 * seed))
    return found


def test_whole_runs_wait_for_their_trials_and_parts_share_what_is_missing():
    tried = {arm for _, arm in trials_of("sgd", WANTED, {})}
    assert set(arms(WANTED._replace(only=("sgd",)), {})) == tried
    assert {(arm.total, arm.seed) for arm in tried} == {(1500, 1)}, "a trial is as long as the run it is for"
    lines = stored_lines({})
    stored = {line.arm: line for line in lines}
    named = list(arms(WANTED, stored))
    trials = {arm.key for method in methods() for _, arm in trials_of(method, WANTED, {})}
    whole = {arm.key for arm in named} - trials
    beside = sum(bool(trials_of(method, WANTED, {})) for method in methods())  # their best trial is a run already
    assert len(whole) == 2 * len(cells(WANTED)) - beside
    each = [{key for key in whole if int(key, 16) % 3 == part} for part in range(3)]
    assert sum(map(len, each)) == len(whole)
    firsts = [next_arm(WANTED, stored, part, 3) for part in (1, 2, 3)]
    assert [int(arm.key, 16) % 3 for arm in firsts] == [0, 1, 2]


def test_the_trial_with_the_lowest_loss_is_used():
    trials = trials_of("nesterov", WANTED, {})
    losses = [3.3, 3.1, 3.2, float("inf"), 3.4, 3.5]
    stored = {arm: fixed(arm, loss) for (_, arm), loss in zip(trials, losses, strict=True)}
    assert best_trial("nesterov", WANTED, stored) == best_trial("nesterov-float32", WANTED, stored) == trials[1][0]
    assert best_trial("nesterov", WANTED, dict(list(stored.items())[1:])) is None


def test_a_larger_size_tries_what_was_best_at_the_smallest():
    small = WANTED._replace(total=4500)
    tried = [arm for _, arm in trials_of("nesterov", small, {})]
    losses = [3.3, 3.1, 3.2, float("inf"), 3.4, 3.15]
    stored = {arm: fixed(arm, loss) for arm, loss in zip(tried, losses, strict=True)}
    shorter = [arm for _, arm in trials_of("nesterov", WANTED, {})]
    stored |= {arm: fixed(arm, 4 - at) for at, arm in enumerate(shorter)}
    larger = Wanted("tiny", 1500, 3)
    best = [methods()["nesterov"].trials[at] for at in (1, 5)]
    found = trials_of("nesterov", larger, stored)
    assert [trial for trial, _ in found] == best
    assert {(arm.size, arm.total, arm.seed) for _, arm in found} == {("tiny", 1500, 1)}
    stored |= {arm: fixed(arm, loss) for (_, arm), loss in zip(found, (3.0, 2.9), strict=True)}
    assert best_trial("nesterov-float32", larger, stored) == best[1]
    assert len(trials_of("nesterov", larger, dict(list(stored.items())[1:6]))) == len(tried), (
        "one trial is missing"
    )


def test_a_line_of_another_code_or_device_is_trained_again():
    arm = arm_of("average", "micro", total=1500, seed=1)
    assert reusable([fixed(arm, 3.0)], "cpu").keys() == {arm}
    assert not reusable([fixed(arm, 3.0, code="other")], "cpu")
    assert not reusable([fixed(arm, 3.0)], "cuda")
    assert arm.key != arm_of("average", "micro", total=1500, seed=2).key


def test_a_line_of_a_code_that_somebody_trusts_is_not_trained_again(tmp_path):
    arm, other = (arm_of("average", "micro", total=1500, seed=seed) for seed in (1, 2))
    lines = [fixed(arm, 3.0, code="older"), fixed(other, 3.0, code="oldest")]
    assert reusable(lines, "cpu", ("older",)).keys() == {arm}
    changed = replace(lines[0], key="0" * 16)  # its settings mean something else by now
    assert not reusable([changed], "cpu", ("older",))
    add_line(tmp_path / FILE, lines[0])
    with pytest.raises(ConfigError, match="no stored line has it"):
        measured(tmp_path, codes="oldest")
    (_, first), (_, second), *_ = trials_of("average", WANTED, {})
    add_line(tmp_path / FILE, fixed(first, 3.0, code="older"))
    left = partial(convergence._next, WANTED._replace(only=("average",)), tmp_path / FILE, (1, 1), "cpu")
    assert (left(()), left(("older",))) == (first, second)


# --- what is said of it -----------------------------------------------------------------------


def judged(lines):
    return {row.metric: row for row in bar_rows(WANTED, lines)}


def test_ours_is_judged_against_the_better_diloco_by_equal_seeds():
    rows = judged(stored_lines())
    loss = rows["loss, ours / better DiLoCo (nesterov-float32 H=15)"]
    assert loss.passed is True
    assert loss.value == pytest.approx((3.01 / 3.11 + 3.02 / 3.12) / 2)
    assert rows["ours / data-parallel AdamW"].passed is True
    assert rows["τ = 4 / no overlap"].passed is True
    assert rows["rounds of that comparison"].passed is False
    without = {name: loss for name, loss in MAIN.items() if name != "sgd-overlap"}
    assert judged(stored_lines(without))["τ = 4 / no overlap"].value is None
    worse = judged(stored_lines({**MAIN, "nesterov": 2.9}))
    assert worse["loss, ours / better DiLoCo (nesterov H=15)"].passed is False
    assert judged(stored_lines({**MAIN, "sgd": 3.1}))["ours / data-parallel AdamW"].passed is False
    assert judged(stored_lines({**MAIN, "sgd-overlap": 3.05}))["τ = 4 / no overlap"].passed is False


def test_ours_with_muon_is_judged_against_both_optimizers():
    lines = stored_lines({**MAIN, "sgd-muon": 2.9, "nesterov-muon": 3.0, "muon-parallel": 2.8})
    rows = {name: row.passed for name, row in judged(lines).items() if name.startswith("ours with Muon")}
    assert rows == {
        "ours with Muon / DiLoCo (nesterov H=15)": True,
        "ours with Muon / data-parallel AdamW": True,
        "ours with Muon / DiLoCo with Muon": True,
        "ours with Muon / data-parallel Muon": False,
    }


def test_a_claim_is_judged_by_the_method_and_what_its_paper_compares_it_with():
    lines = stored_lines({**MAIN, "nesterov-muon": 3.1, "isotropic": 3.3, "blend": 3.21})
    rows = {row.metric: row.passed for row in claim_rows(WANTED, lines)}
    assert rows.pop("MuLoCo below DiLoCo: nesterov-muon / nesterov") is True
    assert rows.pop("IsoLoCo below DiLoCo: isotropic / nesterov") is False
    assert rows.pop("Streaming DiLoCo as good as DiLoCo: blend / nesterov") is True
    assert rows.pop("SparseLoCo below DiLoCo: ours / nesterov") is True
    unknown = {name for name, passed in rows.items() if passed is None}
    assert unknown == {
        "its authors' code as good as ours: reference / ours",
        "EDiT not above DiLoCo: edit / nesterov",
    }, "of the others a trial is a run; what was not run is neither"


def test_the_better_one_is_unknown_while_one_is_missing():
    lines = [line for line in stored_lines() if line.arm.method != "nesterov"]
    assert better_diloco(whole_runs(WANTED, lines)) is None
    assert all(row.value is None for row in bar_rows(WANTED, lines)[:2])


def test_an_interval_is_students():
    found = estimate([1.0, 2.0, 3.0])
    assert (found.mean, found.half) == (2.0, pytest.approx(4.303 / np.sqrt(3), rel=1e-3))
    assert estimate([1.0]).half is None
    assert estimate([1.0, float("inf")]).half is None


def test_the_page_follows_from_the_lines_and_says_what_was_not_run(tmp_path):
    lines = stored_lines()
    for at in ("a", "b"):
        write_page(tmp_path / at / "convergence.md", WANTED, lines)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == ["convergence-micro-1500-bytes.svg", "convergence-micro-1500-tokens.svg", "convergence.md"]
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files)
    page = (tmp_path / "a" / "convergence.md").read_text(encoding="utf-8")
    assert "average-float32 H=15," in page.split("**Not run:**")[1]
    assert "| rounds of that comparison | >= 300 | 100 | **missed** |" in page
    assert "Sizes that were not run: tiny, 10m, 125m." in page
    assert all(f"]({name})" in page for name in files[:2])
    assert max(map(len, (line for line in page.splitlines() if not line.startswith("|")))) <= 100


def test_the_page_in_the_documentation_is_that_of_the_lines_beside_it(tmp_path):
    results = Path(__file__).resolve().parents[2] / "docs" / "results"
    measured(results, report=str(tmp_path / "convergence.md"))
    assert (tmp_path / "convergence.md").read_text() == (results / "convergence.md").read_text()


BAD = [
    ({"part": "0/1"}, "not a part"),
    ({"part": "3/2"}, "not a part"),
    ({"part": "half"}, "not a part"),
    ({"size": "huge"}, "no size 'huge'"),
    ({"arms": "adam"}, "no method 'adam'"),
    ({"report": "page.md"}, "nothing to report"),
    ({"codes": "72ceea78b2fc"}, "no stored line has it"),
]


@pytest.mark.parametrize(("settings", "complaint"), BAD)
def test_bad_settings_are_refused_in_one_line_before_anything_is_trained(settings, complaint, tmp_path):
    with pytest.raises(ConfigError, match=complaint) as refused:
        measured(tmp_path, **settings)
    assert "\n" not in refused.value.line()
    assert not (tmp_path / FILE).exists()


BAD_ARMS = [
    (("outer.rule=average", "outer.alpha_256=128"), "alpha_256"),
    (("outer.rule=nesterov", 'reduce={"k": 128}'), "reduce"),
    (("compress.k=0",), "compress.k"),
    (("compress.codec=none",), "compress.codec"),
    (("outer.stages=[]",), "outer.stages"),
    (("nothing.here=1",), "no nothing"),
]


@pytest.mark.parametrize(("trial", "complaint"), BAD_ARMS)
def test_an_arm_that_no_run_can_have_is_refused(trial, complaint):
    with pytest.raises(ConfigError, match=complaint):
        spec_of(arm_of("sgd", "micro", total=15, seed=1, trial=trial))


def test_exact_contributions_cannot_overlap(tmp_path):
    spec, data = spec_and_data("sgd-overlap")
    with pytest.raises(ConfigError, match="whole rounds"):
        _Rounds(Task(spec, data, MEMBERS, 2), tmp_path, exact=True)


def test_a_line_that_is_none_is_refused_with_its_number(tmp_path):
    add_line(tmp_path / FILE, fixed(arm_of("average", "micro", total=15, seed=1), 3.0))
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'{"key": 1}\n')
    with pytest.raises(DecodeError, match="line 2"):
        read_lines(tmp_path / FILE)
