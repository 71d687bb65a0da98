"""`privacy`: members clip the gradient of each sequence and add noise, and what that protects (docs/privacy.md).

A step releases Σ clipped gradients + N(0, (σC)²) (DP-SGD, arXiv 1607.00133). To one sequence that is a Gaussian
mechanism of sensitivity C, and n of them, chosen adaptively, are together √n/σ-GDP, exactly (Dong, Roth and Su,
arXiv 1905.02383, corollary 3.3). The order of the data is public, so no amplification by sampling is claimed.
"""

import math
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from atoll.protocols.errors import ConfigError
from atoll.protocols.run.sections.refusals import Refusal, refuse

_OWN = ("file:", "plugin:")
"""Sources of which each member may have its own."""
_MAX_EPSILON = 1e9
_FAR = 25.0
"""Beyond so many deviations the normal tail comes from its series: `erfc` loses digits there, then is 0."""


class PrivacySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Differentially private steps. What is protected is one sequence, or one example of a package's model."""

    clip: Annotated[float, Meta(ge=1e-6, le=1e6)]
    """C: largest norm of the gradient of one sequence."""
    noise: Annotated[float, Meta(ge=0.01, le=1e4)]
    """σ: deviation of the noise in each value of the sum of a step, in units of `clip`."""
    delta: Annotated[float, Meta(ge=1e-12, le=0.01)] = 1e-5
    """δ at which ε is reported; below one over the number of sequences of a member's data."""
    most: Annotated[float, Meta(ge=1e-3, le=1e6)] | msgspec.UnsetType = msgspec.UNSET
    """Largest ε of a member: it begins no round that would take it beyond; unset: it trains until the end."""
    own_data: bool = False
    """Whether each member has data of its own, which `data.digest` does not fix."""


_REFUSED: tuple[Refusal, ...] = (
    (
        "inner.optimizer spsa",
        lambda spec: spec.inner.optimizer == "spsa",
        "its byte a step is made of losses; there is no gradient to clip",
    ),
    (
        "objective",
        lambda spec: bool(spec.objective),
        "its term joins the sequences of a step; each must have a gradient of its own",
    ),
    (
        "model.experts",
        lambda spec: spec.model.experts is not None,
        "routers are balanced by loads of the data, without noise",
    ),
    (
        "audit",
        lambda spec: bool(spec.audit),
        "it asks what a member's own windows improve, which noise is to hide",
    ),
)


def check_privacy(spec: Any) -> None:
    """Raise ConfigError for a RunSpec whose settings do not go with its privacy."""
    if not spec.privacy:
        return
    refuse(spec, "privacy", _REFUSED)
    if not spec.privacy.own_data:
        return
    if not spec.data.source.startswith(_OWN):
        raise ConfigError("privacy.own_data is for data.source file:… or plugin:…: others are the same for all")
    if spec.data.digest or spec.data.size:
        raise ConfigError("privacy.own_data and data.digest cannot go together: each member has other data")
    if spec.data.tokenizer == "bpe8k":
        raise ConfigError(
            "privacy.own_data and data.tokenizer bpe8k cannot go together: each member would learn another one"
        )


def has_own_data(spec: Any) -> bool:
    """Whether each member of a run has data of its own."""
    return bool(spec.privacy and spec.privacy.own_data)


def epsilon(uses: int, noise: float, delta: float) -> float:
    """ε at δ after `uses` steps that used one sequence, with noise σ; 0 for none. At most 10⁻⁹ of it too high.

    The least ε with Φ(−ε/μ + μ/2) − e^ε Φ(−ε/μ − μ/2) ≤ δ, for μ = √uses / σ (Balle and Wang, arXiv 1805.06530).
    """
    if uses <= 0:
        return 0.0
    mu = math.sqrt(uses) / noise
    if _delta(0.0, mu) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while _delta(high, mu) > delta and high < _MAX_EPSILON:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        if _delta(middle, mu) > delta:
            low = middle
        else:
            high = middle
    return high


def _delta(eps: float, mu: float) -> float:
    """δ of a μ-GDP mechanism at this ε. Both terms in logarithms: e^ε alone would overflow."""
    first, second = _log_tail(eps / mu - mu / 2), eps + _log_tail(eps / mu + mu / 2)
    return math.exp(first) - math.exp(second)


def _log_tail(at: float) -> float:
    """log Φ(−at)."""
    if at < _FAR:
        return math.log(math.erfc(at / math.sqrt(2)) / 2)
    # The asymptotic series of Mills' ratio; its next term is below 10⁻⁹.
    square = at * at
    series = 1 - 1 / square * (1 - 3 / square * (1 - 5 / square))
    return -square / 2 - math.log(at * math.sqrt(2 * math.pi)) + math.log(series)
