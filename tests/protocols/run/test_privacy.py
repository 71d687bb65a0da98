"""`privacy`: what it cannot go with is refused when a run is made; unset, run ids stay; ε is the exact one."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace

from atoll.protocols import codec
from atoll.protocols.errors import ConfigError, DecodeError
from atoll.protocols.ids import digest
from atoll.protocols.run.model_spec import ExpertsSpec
from atoll.protocols.run.run_spec import open_run, sign_run
from atoll.protocols.run.sections.audits import AuditSpec
from atoll.protocols.run.sections.compression import CompressSpec
from atoll.protocols.run.sections.objective import ObjectiveSpec
from atoll.protocols.run.sections.privacy import PrivacySpec, epsilon

PLAIN = PrivacySpec(clip=1.0, noise=1.0)


def private(**more):
    return lambda spec: replace(spec, privacy=replace(PLAIN, **more))


def beside(**more):
    return lambda spec: replace(spec, privacy=PLAIN, **more)


def key(part, **more):
    return lambda spec: replace(private()(spec), **{part: replace(getattr(spec, part), **more)})


def own(**more):
    data = {"source": "file:mine.txt", "digest": b"", "size": 0} | more
    return lambda spec: replace(private(own_data=True)(spec), data=replace(spec.data, **data))


def spsa(spec):
    return replace(
        private()(spec),
        inner=replace(spec.inner, optimizer="spsa", weight_decay=0.0, lr=1e-3),
        outer=replace(spec.outer, overlap_steps=0, overlap_most=UNSET),
        compress=CompressSpec(codec="scalar", k=512, feedback=0.0),
        reduce=None,
    )


REFUSED = [
    (private(clip=0.0), "privacy.clip"),
    (private(clip=math.nan), "privacy.clip|float"),
    (private(clip=math.inf), "privacy.clip|float"),
    (private(clip=1e7), "privacy.clip"),
    (private(noise=0.0), "privacy.noise"),
    (private(noise=-1.0), "privacy.noise"),
    (private(noise=math.nan), "privacy.noise|float"),
    (private(noise=2e4), "privacy.noise"),
    (private(delta=0.0), "privacy.delta"),
    (private(delta=0.5), "privacy.delta"),
    (private(most=0.0), "privacy.most"),
    (private(most=math.inf), "privacy.most|float"),
    (spsa, "privacy and inner.optimizer spsa cannot go together"),
    (beside(objective=ObjectiveSpec(name="sigreg.1", weight=1.0)), "privacy and objective cannot go together"),
    (
        key("model", experts=ExpertsSpec(count=4, per_token=2, ffn=50)),
        "privacy and model.experts cannot go together",
    ),
    (beside(audit=AuditSpec(), reduce=None), "privacy and audit cannot go together"),
    (own(source="synthetic:markov"), "privacy.own_data is for data.source file:… or plugin:…"),
    (own(source="packed:x", digest=digest(b"")), "privacy.own_data is for data.source file:… or plugin:…"),
    (own(digest=digest(b"")), "privacy.own_data and data.digest cannot go together"),
    (own(size=4096), "privacy.own_data and data.digest cannot go together"),
    (own(tokenizer="bpe8k"), "privacy.own_data and data.tokenizer bpe8k cannot go together"),
]
LEGAL = [
    private(),
    private(clip=1e-6, noise=0.01, delta=1e-12, most=1e-3),
    private(clip=1e6, noise=1e4, delta=0.01, most=1e6),
    key("inner", optimizer="muon"),
    key("outer", fragments=2),
    own(),
]


@pytest.mark.parametrize(("change", "said"), REFUSED)
def test_what_privacy_cannot_go_with_is_refused_in_one_line(spec, owner, change, said):
    with pytest.raises(ConfigError, match=said) as caught:
        sign_run(change(spec), owner)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", LEGAL)
def test_what_works_is_a_run_that_opens_again(spec, owner, change):
    run = change(replace(spec, reduce=None))
    assert open_run(sign_run(run, owner)) == run


def test_a_run_without_privacy_has_the_bytes_that_it_had(spec):
    assert b"privacy" not in codec.encode(spec)


def test_the_same_privacy_has_one_form():
    tree = msgspec.to_builtins(PLAIN)
    assert tree == {"clip": 1.0, "noise": 1.0}
    with pytest.raises(DecodeError, match="canonical"):
        codec.decode(codec.encode(tree | {"own_data": False}), PrivacySpec)
    with pytest.raises(DecodeError):
        codec.decode(codec.encode(tree | {"sampling": 0.1}), PrivacySpec)


# --- ε ---------------------------------------------------------------------------------------------

GOLDEN = [
    # The published calibration of the Gaussian mechanism: ε = 1 at δ = 1e-5 needs σ = 3.730631634….
    (1, 3.730631634815942, 1e-5, 1.0),
    # Computed with 60 digits (mpmath: the root of Φ(−ε/μ + μ/2) − e^ε Φ(−ε/μ − μ/2) − δ).
    (1, 1.0, 1e-5, 4.3771780956812),
    (10, 1.0, 1e-5, 17.856586830108),
    (100, 1.0, 1e-5, 91.817289624664),
    (100, 0.5, 1e-6, 294.17178625764),
    (5, 2.0, 1e-9, 6.9864234288949),
    (1, 30.0, 1e-12, 0.20908548066626),
    (1, 1000.0, 1e-12, 0.0056995464684263),
    (1, 0.01, 1e-5, 5425.5098461474),
]


@pytest.mark.parametrize(("uses", "noise", "delta", "found"), GOLDEN)
def test_epsilon_is_the_exact_one_and_never_below_it(uses, noise, delta, found):
    assert epsilon(uses, noise, delta) == pytest.approx(found, rel=2e-9)
    assert epsilon(uses, noise, delta) >= found * (1 - 1e-9)


@given(st.integers(1, 400), st.floats(0.3, 20.0), st.sampled_from([1e-3, 1e-5, 1e-7]))
def test_epsilon_holds_for_two_neighbours_of_one_step_after_the_other(uses, noise, delta):
    """δ at ε is ∫ max(0, p − e^ε q) over the outputs of the two: normal, √uses/σ apart."""
    found, apart = epsilon(uses, noise, delta), math.sqrt(uses) / noise
    at_X = np.linspace(-12.0, apart + 12.0, 400_001)
    log_p, log_q = -((at_X - apart) ** 2) / 2, found - at_X**2 / 2
    excess = np.where(log_p > log_q, np.exp(log_p) - np.exp(np.minimum(log_q, log_p)), 0.0)
    exact = excess.sum() * (at_X[1] - at_X[0]) / math.sqrt(2 * math.pi)
    assert exact <= delta * 1.001
    assert found == 0 or exact == pytest.approx(delta, rel=1e-2)


@given(st.integers(0, 10**6), st.floats(0.05, 100.0))
def test_epsilon_rises_with_uses_and_falls_with_noise(uses, noise):
    assert epsilon(uses, noise, 1e-5) <= epsilon(uses + 1, noise, 1e-5)
    assert epsilon(uses, noise, 1e-5) >= epsilon(uses, 1.5 * noise, 1e-5)
    assert epsilon(4 * uses, 2 * noise, 1e-5) == pytest.approx(epsilon(uses, noise, 1e-5), rel=1e-8)


def test_nothing_that_was_used_is_nothing_that_was_said():
    assert epsilon(0, 0.01, 1e-12) == 0
