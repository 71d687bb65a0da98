"""Optimiser state that travels: of one expert between two members, and of a checkpoint to all.

Of one expert, from a member that gives it up to one that takes it:

    u32      steps, little-endian
    bfloat16 Adam's first moments of all its values, atoms in the arena's order, each in its natural shape
    bfloat16 the second moments, likewise

The moments forget within 1 / (1 − β₂) steps: a short float is enough. A file has one legal size in a run.

A checkpoint's state comes in several files, so that a member fetches what it trains (node/checkpoint/shards.py):
file 0 has all that is no expert's, each other one a group of experts with consecutive numbers.
"""

from collections.abc import Iterable

from atoll.protocols.run.arena import Placement, arena_of
from atoll.protocols.run.model_spec import ModelSpec, expert_of

KINDS = ("exp_avg", "exp_avg_sq")
"""Adam's first and second moment, by their names in torch and in files."""
HEAD_BYTES = 4
MAX_STEPS = 1 << 24
"""Adam counts in float32, which is exact up to here."""
MAX_OFFERED = 48
"""Experts that one register may offer moments of."""
MAX_GROUPS = 255
"""More experts share files: the RunSpec names all files, and has its limit."""


def file_count(model: ModelSpec) -> int:
    """Files of a checkpoint's moments."""
    return 1 + min(model.expert_count, MAX_GROUPS)


def file_of(model: ModelSpec, atom: str) -> int:
    """The file that has an atom's state."""
    expert = expert_of(atom)
    return 0 if expert is None else file_of_expert(model, expert)


def file_of_expert(model: ModelSpec, expert: int) -> int:
    """The file that has an expert's state."""
    return 1 + expert * (file_count(model) - 1) // model.expert_count


def files_for(model: ModelSpec, experts: Iterable[int]) -> tuple[int, ...]:
    """What a member needs that trains these experts; rising."""
    return (0, *sorted({file_of_expert(model, expert) for expert in experts}))


def places_of(model: ModelSpec, expert: int) -> tuple[Placement, ...]:
    """The atoms of one expert, in the arena's order."""
    return tuple(place for place in arena_of(model).placements if expert_of(place.name) == expert)


def moments_bytes(model: ModelSpec) -> int:
    """The only legal size; 0 where a model has no experts."""
    if model.experts is None:
        return 0
    return HEAD_BYTES + 4 * sum(place.shape[0] * place.shape[1] for place in places_of(model, 0))
