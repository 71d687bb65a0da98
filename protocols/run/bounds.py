"""Largest legal sizes of the files of a run, from the RunSpec alone."""

import math

from atoll.protocols.run.model_spec import ModelSpec, atoms
from atoll.protocols.run.moments import file_of
from atoll.protocols.run.run_spec import RunSpec
from atoll.protocols.run.sized_payload import table_numbers


def moments_max_bytes(spec: RunSpec, number: int) -> int:
    """Return an upper bound of a moments file of the run: 12 bytes a value and four header entries per atom."""
    mine = [atom for atom in atoms(spec.model) if file_of(spec.model, atom.name) == number]
    return 12 * sum(math.prod(atom.shape) for atom in mine) + 4 * 512 * len(mine) + 4096


def snapshot_max_bytes(spec: RunSpec) -> int:
    """Return an upper bound of a snapshot: 4 bytes a value and a header entry per atom, again for a momentum."""
    table = 4 * table_numbers(spec) + 512 if spec.compress.sizes else 0
    return _snapshot_bytes(spec.model, 1 + spec.outer.momenta) + table


def base_max_bytes(spec: RunSpec) -> int:
    """Return an upper bound of the frozen base, a snapshot of the whole model; 0 for a run without one."""
    return _snapshot_bytes(spec.model.base, 1) if spec.base else 0


def _snapshot_bytes(model: ModelSpec, arrays: int) -> int:
    return arrays * (4 * model.parameters + 512 * len(atoms(model))) + 4096
