"""A guard gives every run the defences that it can have: laws over the presets, and what is left out and why."""

import msgspec
import pytest

from atoll.cli.runs.changes import with_changes
from atoll.cli.runs.methods import METHODS
from atoll.node.runs.guard import SAID, Defences, defences_of, guarded, left_out
from atoll.node.runs.presets import NAMES, fragmented, preset, with_adamw
from atoll.protocols.ids import peer_id_of

OWNER = peer_id_of(bytes(range(32)))
EXCISIONS = "pace.excise_rounds and audit cannot go together: the member's verdicts changed the weights of others"
WHOLE = "audit needs contributions to the whole model: outer.holders 0 and outer.fragments 1"


def made(name="tiny", *changes):
    return with_changes(preset(name, OWNER, 1), changes)


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_has_all_that_goes_together(name):
    spec = guarded(made(name))
    spec.check()
    assert defences_of(spec) == Defences("nnm", 3, 8, 64, 0, 0, True)
    assert spec.reduce is None
    assert left_out(spec) == {"pace.excise_rounds": EXCISIONS}


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ((), 8),
        (("inner.batch=16",), 16),
        (("inner.batch=12",), 12),
        (("outer.stages=[[0,1]]",), 8),
    ],
)
def test_audits_take_half_as_long_as_the_steps_where_few_windows_show_enough(changes, windows):
    assert guarded(made("tiny", *changes)).audit.windows == windows


def test_audits_keep_their_windows_where_adamw_moves_the_layers():
    spec = made()
    assert guarded(msgspec.structs.replace(spec, inner=with_adamw(spec.inner))).audit.windows == 16


def test_windows_of_the_owner_stay():
    spec = guarded(made("tiny", "reduce=null", 'audit={"windows":32}'), {"audit.windows"})
    assert spec.audit.windows == 32


@pytest.mark.parametrize("name", ["10m", "1b"])
def test_a_run_in_slices_has_no_audits_and_says_why(name):
    spec = guarded(made(name, "model.ffn_slices=8", "outer.holders=1024", "reduce=null"))
    assert defences_of(spec) == Defences("nnm", 0, 8, 64, 0, 0)
    assert left_out(spec)["audit"] == WHOLE


def test_nor_has_one_in_fragments():
    spec = guarded(fragmented(made(), 4))
    assert (defences_of(spec).audits, left_out(spec)["audit"]) == (0, WHOLE)


@pytest.mark.parametrize("method", METHODS)
def test_a_published_method_has_what_goes_with_it(method):
    before = made("tiny", *METHODS[method].split())
    spec = guarded(before)
    spec.check()
    # Estimates of econtrol need equal weights; payloads of lgreco have another k; those of gossip work of several.
    assert defences_of(spec).judges == (method not in ("econtrol", "lgreco", "gossip"))
    assert spec.outer.rule == before.outer.rule
    assert {key for key in SAID if msgspec.UNSET is value_of(spec, key)} == set(left_out(spec))


def value_of(spec, key):
    for name in key.split("."):
        spec = getattr(spec, name, msgspec.UNSET)
    return spec


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        (("reduce=null", "outer.aggregate=krum"), Defences("krum", 3, 8, 64, 0, 0, True)),
        (("reduce=null", 'audit={"each":1}'), Defences("nnm", 1, 8, 64, 0, 0, True)),
        (("pace.probation=32",), Defences("nnm", 3, 32, 64, 0, 0, True)),
        (("reduce=null", "pace.excise_rounds=9"), Defences("nnm", 0, 8, 256, 9, 0)),
        (("reduce.k=64",), Defences("", 0, 8, 256, 0, 0)),
    ],
)
def test_what_the_owner_set_stays(changes, found):
    spec = guarded(made("tiny", *changes), {change.partition("=")[0] for change in changes})
    assert defences_of(spec) == found
    assert bool(spec.reduce) == (changes == ("reduce.k=64",))


@pytest.mark.parametrize("history", [(), ("history={}", "history.every=16")])
def test_a_guarded_run_has_summaries_too(history):
    spec = guarded(made("tiny", *history), {"history"} if history else ())
    spec.check()
    assert (defences_of(spec).audits, defences_of(spec).voters) == (3, True)
    assert spec.history.every == (16 if history else 64)


def test_what_takes_work_out_of_final_rounds_has_no_summaries():
    spec = guarded(made("tiny", "reduce=null", "pace.excise_rounds=9"), {"reduce", "pace.excise_rounds"})
    assert not spec.history
    assert "history" in left_out(spec)["history"]


def test_a_reduced_run_names_what_it_cannot_have():
    whys = left_out(guarded(made(), {"reduce"}))
    assert set(whys) == {
        "outer.aggregate",
        "outer.by_weight",
        "audit",
        "audit.voters",
        "audit.newcomers",
        "audit.by_payload",
        "pace.probation_256",
        "pace.excise_rounds",
    }
    assert whys["audit"].startswith("reduce and audit cannot go together: ")


def test_a_length_is_no_judgement():
    assert not defences_of(made("tiny", "reduce=null", "outer.aggregate=edit")).judges
    assert defences_of(made("tiny", "reduce=null", "outer.aggregate=clip")).judges
    assert not defences_of(made()).judges
