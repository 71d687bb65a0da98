"""The mean of a round: what `outer.rule` average and `outer.spectrum` cannot go with (docs/outer-loop.md)."""

from typing import Any, Literal, TypeAlias

from atoll.protocols.errors import ConfigError
from atoll.protocols.run.sections.refusals import Refusal, refuse

Spectrum: TypeAlias = Literal["isotropic"]
"""`outer.spectrum`: what becomes of the singular values of a round's mean."""

_ANOTHER = "the mean of the members' weights is another step"
_AVERAGE: tuple[Refusal, ...] = (
    ("outer.aggregate", lambda spec: bool(spec.outer.aggregate), _ANOTHER),
    ("pace.probation_256", lambda spec: bool(spec.pace.probation_256), _ANOTHER),
    ("outer.spectrum", lambda spec: bool(spec.outer.spectrum), _ANOTHER),
)
_ISOTROPIC: tuple[Refusal, ...] = (
    ("reduce", lambda spec: spec.reduce is not None, "slices of a reduced round are not whole matrices"),
    (
        "compress.feedback_rule econtrol",
        lambda spec: spec.compress.feedback_rule == "econtrol",
        "the fold must move by the estimate that members keep",
    ),
)


def check_average(spec: Any) -> None:
    """Refuse a RunSpec whose rule is average where the step is not the whole mean. Raises ConfigError."""
    if spec.outer.rule != "average":
        return
    if spec.outer.alpha_256 != 256:
        raise ConfigError("outer.rule average needs outer.alpha_256 256: the whole mean is the step")
    if spec.compress.codec not in ("int8", "e3m0"):
        raise ConfigError("outer.rule average needs compress.codec int8 or e3m0: weights not sent have no average")
    refuse(spec, "outer.rule average", _AVERAGE)


def check_spectrum(spec: Any) -> None:
    """Refuse an isotropic mean in a RunSpec with settings that it cannot work with. Raises ConfigError."""
    if spec.outer.spectrum:
        refuse(spec, "outer.spectrum isotropic", _ISOTROPIC)
