"""`run new --guard`, `--slices` and `--method`: one flag each, what it sets, and what it says of itself."""

import json
from pathlib import Path

import msgspec
import pytest

from atoll.cli.preview_lines import liar_lines
from atoll.cli.runs import draft
from atoll.node.runs.capacity.machine_fit import Machine
from atoll.node.runs.guard import Defences
from atoll.node.runs.presets import preset
from atoll.protocols.ids import peer_id_of
from tests.cli.runs.test_run_commands import MARKOV, made

FULL = {
    "rule": "nnm",
    "audits": 3,
    "probation": 8,
    "probation_256": 64,
    "excise_rounds": 0,
    "puzzle_bits": 0,
    "voters": True,
}
GUARD_LINES = """\
liars      rule nnm
           each audits 3 contributions a round
           newcomers decide rounds after 8 final sets, once audits by members that decide show work
           a final set names 16 of them, or as many as it names others
           they have a quarter of a set's weight together, and at most 64/256 of their weight for 8 final sets
           an identity costs a puzzle of 20 bits
"""
NO_RULE = "no rule against bad updates"
STRANGERS = "warning: anybody may join, and one bad update can ruin the run: --guard prevents it\n"
OFTEN = "warning: anybody may join as often as it likes: --puzzle makes identities cost time\n"


def test_a_guard_is_one_flag(atoll):
    about = made(atoll, "t", "--guard")
    assert about["liars"] == FULL
    assert about["spec"]["outer"]["aggregate"] == "nnm"
    assert about["spec"]["audit"]["each"] == 3
    assert about["spec"]["reduce"] is None


def test_a_run_for_strangers_is_guarded_and_has_a_puzzle(atoll):
    ran = atoll("run", "new", "t", *MARKOV, "--admission", "open")
    assert (ran.code, ran.err) == (0, "")
    assert GUARD_LINES in ran.out
    assert GUARD_LINES in atoll("run", "show").out
    assert "left out   pace.excise_rounds: pace.excise_rounds and audit cannot go together: " in ran.out
    assert json.loads(atoll("run", "show", "--json").out)["liars"] == {**FULL, "puzzle_bits": 20}


@pytest.mark.parametrize(
    ("words", "said", "judges", "bits"),
    [
        (("--no-guard",), STRANGERS, False, 20),
        (("--puzzle", "0"), OFTEN, True, 0),
        (("--no-guard", "--puzzle", "0"), STRANGERS + OFTEN, False, 0),
        (("--no-guard", "--set", "outer.aggregate=nnm", "--set", "reduce=null"), "", True, 20),
        (("--puzzle", "22"), "", True, 22),
    ],
)
def test_who_takes_it_off_is_told_what_that_means(atoll, words, said, judges, bits):
    ran = atoll("run", "new", "t", *MARKOV, "--admission", "open", *words)
    assert (ran.code, ran.err) == (0, said)
    assert (NO_RULE in ran.out) != judges
    assert json.loads(atoll("run", "show", "--json").out)["liars"]["puzzle_bits"] == bits


@pytest.mark.parametrize("words", [(), ("--admission", "invite"), ("--puzzle", "0")])
def test_other_runs_have_no_rule_and_their_owner_is_told_of_the_flag(atoll, words):
    ran = atoll("run", "new", "t", *MARKOV, *words)
    assert (ran.code, ran.err) == (0, "")
    assert f"liars      {NO_RULE}; `run new --guard` makes a run with all that there are\n" in ran.out


def test_the_preview_has_the_line_without_the_owners_hint():
    spec = preset("tiny", peer_id_of(bytes(32)), 1)
    assert liar_lines(spec)[0] == f"liars      {NO_RULE}"
    pace = msgspec.structs.replace(spec.pace, excise_rounds=50)
    excising = msgspec.structs.replace(spec, pace=pace)
    assert "           excluded work comes out of the newest 50 final rounds" in liar_lines(excising)


def test_slices_are_one_flag(atoll):
    spec = made(atoll, "t", "--preset", "10m", "--slices", "8")["spec"]
    assert (spec["model"]["ffn_slices"], spec["outer"]["holders"], spec["reduce"]) == (8, 1024, None)
    assert spec["inner"].get("expert_lr", 1.0) == 1.0, "a higher rate was measured with one holder only"
    one = made(atoll, "u", "--preset", "50m", "--slices", "9", "--set", "outer.holders=1", "--even-if-too-large")
    assert (one["spec"]["outer"]["holders"], one["spec"]["inner"]["expert_lr"]) == (1, 2.0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--slices", "5", "--set", "audit={}"), "audit needs contributions to the whole model: outer.holders 0"),
        (("--slices", "5", "--fragments", "99"), "outer.fragments = 99 is outside"),
        (("--slices", "8"), "cut model.ffn = 320 into multiples of 64; numbers that do: 5"),
        (("--slices", "4", "--preset", "moe-smoke"), "a mixture has experts: leave one of them out"),
        (("--slices", "5", "--method", "diloco"), "outer.rule nesterov and outer.holders cannot go together"),
        (("--slices", "5", "--set", 'reduce={"k":9}'), "reduce and outer.holders cannot go together"),
        (("--method", "dilocco"), "no such method; use one of sparseloco, sparseloco-code, average, diloco, "),
    ],
)
def test_what_cannot_go_together_is_one_line(atoll, tmp_path, words, said):
    ran = atoll("run", "new", "t", *MARKOV, *words)
    assert (ran.code, ran.err.count("\n")) == (78, 1)
    assert said in ran.err
    assert not (tmp_path / "home/runs/t.run").exists()


def refusal(atoll, monkeypatch, gigabytes, *words):
    """What `run new --preset 1b` says on a machine with a GPU of this size and much other memory."""
    machine = Machine(1 << 50, 1 << 50, "cuda", int(gigabytes * 1e9), 1 << 50)
    monkeypatch.setattr(draft, "measure_machine", lambda *_: machine)
    ran = atoll("run", "new", "big", *MARKOV, "--preset", "1b", *words)
    assert (ran.code, ran.err.count("\n")) == (78, 1)
    return ran.err


def test_a_refusal_names_slices_where_they_would_fit(atoll, monkeypatch, tmp_path):
    (tmp_path / "home").mkdir(mode=0o700)
    (tmp_path / "home" / "config.toml").write_text('device = "cuda"\nexchange_on = "host"\n')
    lack = refusal(atoll, monkeypatch, 11)
    assert ", or --slices 8: then it can train 1 of 8 slices, or give --even-if-too-large" in lack
    assert "--slices" not in refusal(atoll, monkeypatch, 8), "not even one"
    assert "--slices 8 without audits: " in refusal(atoll, monkeypatch, 11, "--guard")
    assert "--slices" not in refusal(atoll, monkeypatch, 11, "--method", "diloco")
    assert atoll("run", "new", "big", *MARKOV, "--preset", "1b", "--slices", "8").code == 0


def test_set_has_the_last_word_over_a_method(atoll):
    inner = made(atoll, "t", "--method", "diloco", "--set", "inner.optimizer=muon")["spec"]["inner"]
    assert (inner["optimizer"], inner["muon_lr"]) == ("muon", 2.0)
    outer = made(atoll, "u", "--set", "outer.alpha_256=90", "--method", "diloco")["spec"]["outer"]
    assert (outer["rule"], outer["alpha_256"]) == ("nesterov", 90)


@pytest.mark.parametrize(("words", "count"), [((), 4), (("--fragments", "2"), 2)])
def test_streaming_has_its_fragments(atoll, words, count):
    outer = made(atoll, "t", "--method", "streaming", *words)["spec"]["outer"]
    assert (outer["fragments"], outer["late"]) == (count, "blend")


def test_every_field_of_the_defences_is_on_the_page_of_json():
    page = (Path(__file__).resolve().parents[3] / "docs" / "json.md").read_text("utf-8")
    section = page.split("## run new, run show, run list")[1].split("\n## ")[0]
    assert [name for name in Defences.__struct_fields__ if f"`{name}`" not in section] == []
