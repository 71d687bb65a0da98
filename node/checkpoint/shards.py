"""What the files of a universal checkpoint hold. Pure functions of the model and of who trains what.

    weight/ATOM       int32, units of 2⁻²⁴, natural shape: Θ_final
    exp_avg/ATOM      float32: Adam's first moment;  exp_avg_sq/ATOM: the second;  step/ATOM `[1]`: its steps
    error/ATOM        float32: what was trained and not said yet

A shard is what one member trains: all that is no expert's, and its experts; beside that `error` of experts that it
trained earlier. The moments files are everything but the weights, of all atoms, once (protocols/run/moments.py).
"""

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from atoll.node.checkpoint.atoms import all_finite
from atoll.node.checkpoint.safefile import Spec
from atoll.protocols.run.model_spec import BIAS, Atom, ModelSpec, atoms, expert_of
from atoll.protocols.run.moments import KINDS, MAX_STEPS, file_of

WEIGHT, STEP, ERROR = "weight", "step", "error"
MOMENTS_NOTE = "moments/1"


def shard_specs(model: ModelSpec, trained: Collection[int], left: Collection[int]) -> dict[str, Spec]:
    """Tensors of a member that trains these experts, and has something to say of those that it `left`."""
    found: dict[str, Spec] = {}
    for atom in atoms(model):
        expert = expert_of(atom.name)
        if expert is None or expert in trained:
            found[f"{WEIGHT}/{atom.name}"] = torch.int32, atom.shape
            found.update(_kept(atom))
        elif expert in left:
            found[f"{ERROR}/{atom.name}"] = torch.float32, atom.shape
    return found


def moment_specs(model: ModelSpec, number: int) -> dict[str, Spec]:
    """Names, dtypes and shapes of the tensors of a moments file."""
    mine = (atom for atom in atoms(model) if file_of(model, atom.name) == number)
    return {name: spec for atom in mine for name, spec in _kept(atom)}


def is_optimised(name: str) -> bool:
    """Whether an atom has moments: a choice bias has none, no gradient moves it."""
    return not name.endswith(BIAS)


def is_valid(name: str, value: Tensor) -> bool:
    """Whether an honest optimiser can have made the tensor `KIND/ATOM` of a moments file."""
    kind = name.partition("/")[0]
    if kind == STEP:
        return bool(((value >= 0) & (value <= MAX_STEPS) & (value == value.round())).all())
    return all_finite(value) and (kind != "exp_avg_sq" or not bool((value < 0).any()))


def _kept(atom: Atom) -> Iterator[tuple[str, Spec]]:
    yield f"{ERROR}/{atom.name}", (torch.float32, atom.shape)
    if is_optimised(atom.name):
        yield f"{STEP}/{atom.name}", (torch.float32, (1,))
        for moment in KINDS:
            yield f"{moment}/{atom.name}", (torch.float32, atom.shape)
