"""Optimiser state of one expert, as it goes from a member that gives the expert up to one that takes it.

    u32      steps, little-endian
    bfloat16 Adam's first moments of all its values, atoms in the arena's order, each in its natural shape
    bfloat16 the second moments, likewise

The moments forget within 1 / (1 − β₂) steps: a short float is enough. A file has one legal size in a run.
"""

from atoll.protocols.arena import Placement, arena_of
from atoll.protocols.model import ModelSpec, expert_of

KINDS = ("exp_avg", "exp_avg_sq")
"""Adam's first and second moment, by their names in torch and in files."""
HEAD_BYTES = 4
MAX_STEPS = 1 << 24
"""Adam counts in float32, which is exact up to here."""
MAX_OFFERED = 48
"""Experts that one register may offer moments of."""


def places_of(model: ModelSpec, expert: int) -> tuple[Placement, ...]:
    """The atoms of one expert, in the arena's order."""
    return tuple(place for place in arena_of(model).placements if expert_of(place.name) == expert)


def moments_bytes(model: ModelSpec) -> int:
    """The only legal size; 0 where a model has no experts."""
    if model.experts is None:
        return 0
    return HEAD_BYTES + 4 * sum(place.shape[0] * place.shape[1] for place in places_of(model, 0))
