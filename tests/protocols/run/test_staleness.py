"""`pace.stale`: what it cannot go with is refused when a run is made, in one line; unset, run ids stay."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.protocols import codec
from atoll.protocols.errors import ConfigError
from atoll.protocols.ids import Round, digest
from atoll.protocols.ledger.entry_rules import is_lawful
from atoll.protocols.ledger.records import Contribution, StaleContribution, age_of, sign_entry
from atoll.protocols.local.contribution_forms import contribution_of
from atoll.protocols.local.worker_messages import Pending
from atoll.protocols.run.model_spec import ExpertsSpec
from atoll.protocols.run.run_spec import CompressSpec, open_run, sign_run
from atoll.protocols.run.sections.audits import AuditSpec
from atoll.protocols.run.sections.history import HistorySpec
from atoll.protocols.run.sections.merging import MergeSpec
from atoll.protocols.run.sections.variants.staleness import MAX_STALE, StaleSpec, legal_age
from atoll.protocols.run.slices import ReduceSpec

DENSE = CompressSpec(codec="int8", k=4096, feedback=0.0)
ECONTROL = CompressSpec(codec="int8", k=4096, feedback=1.0, feedback_rule="econtrol")
SPSA = {"optimizer": "spsa", "weight_decay": 0.0}
REFUSED = [
    ("equal", {"reduce": ReduceSpec()}, "pace.stale and reduce cannot go together"),
    ("fedbuff", {"audit": AuditSpec()}, "pace.stale and audit cannot"),
    ("fedbuff", {"outer": {"overlap_steps": 1}}, "pace.stale and outer.overlap_steps cannot"),
    ("fedbuff", {"outer": {"fragments": 2}}, "pace.stale and outer.fragments cannot"),
    ("fedbuff", {"outer": {"holders": 1}, "experts": True}, "pace.stale and outer.holders cannot"),
    (
        "fedfix",
        {"outer": {"merge": MergeSpec(every=2, until=9, alpha_4096=1024)}, "experts": True},
        "pace.stale and outer.merge cannot",
    ),
    (
        "equal",
        {"inner": SPSA, "compress": CompressSpec(codec="scalar", k=15, feedback=0.0)},
        "pace.stale and inner.optimizer spsa cannot",
    ),
    (
        "fedbuff",
        {"compress": ECONTROL, "outer": {"rule": "slowmo", "momentum_256": 255, "floor_256": 256}},
        "pace.stale and compress.feedback_rule econtrol cannot",
    ),
    (
        "fedbuff",
        {"compress": DENSE, "outer": {"rule": "average", "alpha_256": 256}},
        "pace.stale and outer.rule average cannot",
    ),
    ("fedbuff", {"pace": {"least_256": 64}}, "pace.stale and pace.least_256 cannot"),
    ("fedfix", {"history": HistorySpec(every=128)}, "pace.stale.weights fedfix and history cannot"),
    ("fedfix", {"pace": {"excise_rounds": 4}}, "pace.stale.weights fedfix and pace.excise_rounds cannot"),
    ("fedbuff", {"outer": {"rounds": 8}}, "pace.stale.most must be below outer.rounds"),
    ("fedbuff", {"most": MAX_STALE + 1}, "most"),
    ("fedbuff", {"most": 0}, "most"),
    ("newest", {}, "weights"),
]
LEGAL = [
    ("equal", {}),
    ("fedbuff", {"outer": {"rule": "nesterov", "alpha_256": 179}, "compress": DENSE}),
    ("fedbuff", {"history": HistorySpec(every=128)}),
    ("fedbuff", {"pace": {"excise_rounds": 4}}),
    ("fedfix", {"outer": {"aggregate": "nnm"}, "pace": {"probation": 4, "probation_256": 64}}),
    ("fedfix", {"experts": True}),
]


def changed(spec, weights, more):
    more = dict(more)
    stale = StaleSpec(most=more.pop("most", 8), weights=weights)
    if more.pop("experts", False):
        more["model"] = replace(spec.model, experts=ExpertsSpec(count=4, per_token=2, ffn=50))
    pace = replace(spec.pace, stale=stale, **more.pop("pace", {}))
    for part in ("outer", "inner"):
        if part in more:
            more[part] = replace(getattr(spec, part), **more[part])
    return replace(spec, pace=pace, **more)


@pytest.mark.parametrize(("weights", "more", "said"), REFUSED)
def test_what_old_work_cannot_go_with_is_refused_in_one_line(spec, owner, weights, more, said):
    with pytest.raises(ConfigError, match=said) as caught:
        sign_run(changed(spec, weights, more), owner)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("weights", "more"), LEGAL)
def test_what_works_is_a_run_that_opens_again(spec, owner, weights, more):
    run = changed(spec, weights, more)
    assert open_run(sign_run(run, owner)) == run


def test_a_run_without_it_has_the_bytes_that_it_had(spec):
    assert b"stale" not in codec.encode(spec)


# --- the record -------------------------------------------------------------------------------


def contribution(number, age):
    fields = (Round(number), digest(b"base"), digest(b"payload"), 1, 1, 64, 1.0)
    return StaleContribution(*fields, age=age) if age else Contribution(*fields)


@pytest.mark.parametrize(
    ("number", "age", "counts"),
    [(20, 0, True), (20, 1, True), (20, 8, True), (20, 9, False), (3, 3, True), (3, 4, False)],
)
def test_no_base_is_older_than_the_run_allows_or_than_the_run(spec, owner, number, age, counts):
    run = changed(spec, "fedbuff", {})
    entry = sign_entry(run.id, owner, 0, b"", contribution(number, age))
    assert is_lawful(run, entry) == counts
    if age:
        assert not is_lawful(spec, entry), "other runs have no old work"


def test_old_work_is_announced_with_its_age():
    pending = Pending(Round(9), digest(b"base"), digest(b"payload"), "/path", 5, 640, 64, 2.5)
    assert type(contribution_of(pending)) is Contribution
    old = contribution_of(msgspec.structs.replace(pending, form=bytes([3])))
    assert (type(old), old.round, age_of(old)) == (StaleContribution, 9, 3)


@given(began=st.integers(0, 200), final=st.integers(-1, 300), most=st.integers(1, MAX_STALE))
def test_work_counts_in_the_oldest_open_round_or_in_none(began, final, most):
    stale = StaleSpec(most=most, weights="equal")
    number = stale.counts_in(Round(began), final)
    assert began <= number <= began + most
    assert number == began or legal_age(stale, number, number - began)
    if number > final:
        assert number == max(began, final + 1)
    else:
        assert final >= began + most, "final, so that it returns to the error feedback"
