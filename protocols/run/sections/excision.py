"""`pace.excise_rounds`: with what a member's work can be taken out of final rounds (docs/removal.md)."""

from typing import Any

from msgspec import UNSET

from atoll.protocols.errors import ConfigError


def check_excision(spec: Any) -> None:
    """Refuse excisions in a RunSpec where a round's update cannot be computed again without one of its members."""
    if spec.pace.excise_rounds is UNSET:
        return
    refused = (
        (spec.reduce is not None, "reduce", "a reducer's sums have no parts that can be taken out"),
        (bool(spec.outer.momenta), "outer.rule with momentum", "each step depends on all steps before it"),
        (bool(spec.outer.merge), "outer.merge", "a merge depends on the weights that it found"),
        (spec.audit is not UNSET, "audit", "the member's verdicts changed the weights of others"),
        (bool(spec.pace.probation_256), "pace.probation_256", "the member's work changed the weights of others"),
        (bool(spec.history), "history", "what was taken out follows from every set, and no summary holds it"),
    )
    for is_set, key, why in refused:
        if is_set:
            raise ConfigError(f"pace.excise_rounds and {key} cannot go together: {why}")
