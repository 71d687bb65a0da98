"""`outer.spectrum`: what becomes of the singular values of a round's mean (docs/outer-loop.md)."""

from typing import Any, Literal, TypeAlias

from atoll.protocols.run.sections.refusals import Refusal, refuse

Spectrum: TypeAlias = Literal["isotropic"]


_REFUSED: tuple[Refusal, ...] = (
    ("reduce", lambda spec: spec.reduce is not None, "slices of a reduced round are not whole matrices"),
    (
        "outer.rule average",
        lambda spec: spec.outer.rule == "average",
        "the mean of the members' weights is another step",
    ),
    (
        "compress.feedback_rule econtrol",
        lambda spec: spec.compress.feedback_rule == "econtrol",
        "the fold must move by the estimate that members keep",
    ),
)


def check_spectrum(spec: Any) -> None:
    """Refuse an isotropic mean in a RunSpec with settings that it cannot work with. Raises ConfigError."""
    if spec.outer.spectrum:
        refuse(spec, "outer.spectrum isotropic", _REFUSED)
