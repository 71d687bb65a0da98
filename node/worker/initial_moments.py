"""What the first round of a run takes from a checkpoint beside the weights: Adam's moments, and what was unsaid.

It is for round 0 alone, and for what this node trains in it: later the moments would be old, and what was unsaid
has been said by those who were there. Nothing depends on it, so a file that cannot be used is a line in the log.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from atoll.node.checkpoint.atoms import write_atom
from atoll.node.checkpoint.shards import ERROR, MOMENTS_NOTE, STEP, is_optimised, is_valid, moment_specs
from atoll.node.checkpoint.tensorfile import TensorFile
from atoll.node.worker.error_feedback import ErrorFeedback
from atoll.node.worker.learner import Learner
from atoll.protocols.errors import DecodeError, DiskFault
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.moments import KINDS, file_of
from atoll.protocols.run.run_spec import RunSpec


class Brought:
    """The moments files of a run, as far as it has some and they are here."""

    def __init__(self, spec: RunSpec, paths: Sequence[str]) -> None:
        """`paths`: where the files are, or will be, in their order."""
        self._spec, self._paths = spec, dict(enumerate(map(Path, paths)))

    def give(self, learner: Learner, sending: ErrorFeedback) -> None:
        """Round 0 begins with what `learner` trains: give it what it has not moved yet."""
        known = learner.inner.state()
        trained = learner.weights.trained()
        wanted = dict.fromkeys(atom for atom in trained if not _steps(known, atom))
        found: dict[str, Tensor] = {}
        for number, path in list(self._paths.items()):
            mine = [atom for atom in wanted if file_of(self._spec.model, atom) == number]
            if mine and path.exists():
                found |= self._given(number, mine)
        if not found:
            return
        learner.inner.load(known | {name: value for name, value in found.items() if not name.startswith(ERROR)})
        for place in arena_of(self._spec.model).placements:
            if (error := found.get(f"{ERROR}/{place.name}")) is not None:
                write_atom(sending.residual_C4096, place, error)

    def _given(self, number: int, atoms: list[str]) -> dict[str, Tensor]:
        """Nothing of a file that cannot be used; that is a line in the log."""
        try:
            return self._read(number, atoms)
        except (DecodeError, DiskFault) as error:
            print(f"the checkpoint's moments are not used: {error.line()}", flush=True)  # noqa: T201 - worker's log
            del self._paths[number]
            return {}

    def _read(self, number: int, atoms: list[str]) -> dict[str, Tensor]:
        file = TensorFile(self._paths[number], moment_specs(self._spec.model, number), MOMENTS_NOTE)
        found: dict[str, Tensor] = {}
        for atom in atoms:
            for kind in (ERROR, *((STEP, *KINDS) if is_optimised(atom) else ())):
                name = f"{kind}/{atom}"
                found[name] = file.read(name)
                if not is_valid(name, found[name]):
                    raise DecodeError(f"{name} is not finite, or out of range")
        return found


def _steps(state: Mapping[str, Tensor], atom: str) -> int:
    """Adam's steps with an atom."""
    found = state.get(f"{STEP}/{atom}")
    return 0 if found is None else int(found)
