"""`outer.spectrum`: what becomes of the singular values of a round's mean (docs/outer-loop.md)."""

from typing import Any, Literal, TypeAlias

from atoll.protocols.errors import ConfigError

Spectrum: TypeAlias = Literal["isotropic"]


def check_spectrum(spec: Any) -> None:
    """Refuse an isotropic mean in a RunSpec with settings that it cannot work with. Raises ConfigError."""
    if not spec.outer.spectrum:
        return
    refused = (
        (spec.reduce is not None, "reduce", "slices of a reduced round are not whole matrices"),
        (spec.outer.rule == "average", "outer.rule average", "the mean of the members' weights is another step"),
        (
            spec.compress.feedback_rule == "econtrol",
            "compress.feedback_rule econtrol",
            "the fold must move by the estimate that members keep",
        ),
    )
    for is_set, key, why in refused:
        if is_set:
            raise ConfigError(f"outer.spectrum isotropic and {key} cannot go together: {why}")
