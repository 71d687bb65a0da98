"""Zeroth-order runs: sizes and units follow from the spec, earlier runs are what they were, refusals."""

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from atoll.protocols import codec
from atoll.protocols.errors import ConfigError, DecodeError
from atoll.protocols.ledger.coverage import largest_payload, payload_size
from atoll.protocols.run.model_spec import ExpertsSpec
from atoll.protocols.run.payload import HEADER_BYTES, Layout, check_codec
from atoll.protocols.run.run_spec import SignedRun, Stage, StartSpec, open_run, sign_run
from atoll.protocols.run.sections.audits import AuditSpec
from atoll.protocols.run.sections.compression import CompressSpec, WarmUp
from atoll.protocols.run.sections.zeroth_order import MAX_UNIT, unit_of
from atoll.protocols.run.slices import ReduceSpec

HASH = bytes(range(32))


@pytest.fixture
def scalar(spec):
    """The run of the tests in zeroth-order steps."""
    found = replace(
        spec,
        inner=replace(spec.inner, optimizer="spsa", lr=1e-4, clip=4.0, weight_decay=0.0),
        outer=replace(
            spec.outer, stages=(Stage(0, 8),), overlap_steps=0, overlap_most=UNSET, fragments=1, holders=0
        ),
        compress=CompressSpec(codec="scalar", k=8, feedback=0.0),
        reduce=None,
        start=UNSET,
    )
    found.check()
    return found


def test_a_run_without_scalars_has_the_bytes_that_it_always_had(spec):
    assert b"spread" not in codec.encode(spec)


def test_it_travels_and_a_payload_has_one_byte_a_step(scalar, owner):
    assert open_run(sign_run(scalar, owner)) == scalar
    assert payload_size(scalar, 0) == largest_payload(scalar) == HEADER_BYTES + 8
    layout = Layout("scalar", 258, 8)
    assert layout.header.hex() == "61746c70" + "01" + "06" + "0800" + "02010000"
    assert (layout.row_bytes, layout.offsets) == ((), ())


def test_the_unit_is_exact_and_the_same_everywhere():
    assert unit_of(127 * 2.0**-30, 1.0) == 1
    assert unit_of(1e-3, 4.0) == 33819
    assert unit_of(1e-12, 1.0) == 0


REFUSED = [
    ({"inner": {"optimizer": "adamw"}}, "inner.optimizer spsa and compress.codec scalar go together"),
    ({"compress": {"codec": "int8", "k": 4096}}, "inner.optimizer spsa and compress.codec scalar go together"),
    (
        {"inner": {"optimizer": "adamw", "spread": 0.5}, "compress": {"codec": "int8", "k": 4096}},
        "inner.spread is for runs with inner.optimizer spsa",
    ),
    ({"reduce": ReduceSpec()}, "and reduce cannot go together"),
    ({"outer": {"fragments": 2}}, "and outer.fragments cannot go together"),
    ({"outer": {"overlap_steps": 1}}, "and outer.overlap_steps cannot go together"),
    ({"outer": {"aggregate": "clip", "floor_256": 64}}, "and outer.aggregate cannot go together"),
    ({"outer": {"rule": "average", "alpha_256": 256}}, "average needs compress.codec int8 or e3m0"),
    ({"model": {"experts": ExpertsSpec(count=4, per_token=2, ffn=50)}}, "and model.experts cannot go together"),
    ({"audit": AuditSpec()}, "and audit cannot go together"),
    ({"outer": {"spectrum": "isotropic"}}, "and outer.spectrum cannot go together"),
    ({"compress": {"feedback": 0.5}}, "and compress.feedback cannot go together"),
    ({"compress": {"feedback": 1.0, "feedback_rule": "econtrol"}}, "and compress.feedback cannot go together"),
    ({"compress": {"warmup": (WarmUp(2, 16),)}}, "and compress.warmup cannot go together"),
    ({"inner": {"weight_decay": 0.1}}, "and inner.weight_decay cannot go together"),
    ({"start": StartSpec(weights=HASH, state=HASH, moments=HASH)}, "and start.moments cannot go together"),
    ({"compress": {"k": 7}}, "compress.k = 7: a member may take 8 steps, and each has a scalar"),
    ({"pace": {"most_256": 257}}, "compress.k = 8: a member may take 9 steps"),
    ({"compress": {"k": 513}}, "compress.k = 513 is outside 1 … 512"),
    ({"inner": {"lr": 1e-8, "clip": 1.0}}, r"inner.lr · inner.clip, .* is outside 1.2e-07 … 7.8e-03"),
    ({"inner": {"lr": 1e-2, "clip": 1.0}}, r"inner.lr · inner.clip, .* is outside 1.2e-07 … 7.8e-03"),
    ({"inner": {"muon_lr": 2.0}}, "inner.muon_lr is for runs with inner.optimizer muon"),
]


def changed(spec, changes):
    for key, value in changes.items():
        spec = replace(spec, **{key: replace(getattr(spec, key), **value) if isinstance(value, dict) else value})
    return spec


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_what_cannot_go_together_is_refused_here_and_from_outside(scalar, owner, changes, words):
    bad = changed(scalar, changes)
    with pytest.raises(ConfigError, match=words):
        bad.check()
    body = codec.encode(bad)
    with pytest.raises(DecodeError, match=words):
        open_run(codec.encode(SignedRun(body, owner.sign("run/1", body))))


@pytest.mark.parametrize(
    "changes",
    [
        {"outer": {"rule": "nesterov", "alpha_256": 179}},
        {"outer": {"rule": "co2", "clip_65536": 99}},
        {"start": StartSpec(weights=HASH, state=HASH)},
        {"inner": {"spread": 0.01}, "compress": {"k": 512}},
        {"pace": {"most_256": 512}, "compress": {"k": 16}},
    ],
)
def test_what_goes_together_is_legal(scalar, changes):
    changed(scalar, changes).check()


def test_the_largest_unit_is_legal_and_the_codec_is_known():
    check_codec("scalar", 512)
    assert unit_of(127 * MAX_UNIT * 2.0**-30, 1.0) == MAX_UNIT
