"""What the first round of a run takes from a checkpoint beside the weights: Adam's moments and error feedback.

It is for round 0 alone, and for what this node trains in it: later the moments would be old, and the members of
that round have sent the error feedback. Nothing depends on it, so a file that cannot be used is a line in the log.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from atoll.node.checkpoint.tensorfile import TensorFile, write_atom
from atoll.node.checkpoint.universal import ERROR, MOMENTS_NOTE, STEP, is_optimised, is_valid, moment_specs
from atoll.node.worker.error_feedback import ErrorFeedback
from atoll.node.worker.learner import Learner
from atoll.protocols.errors import DecodeError, DiskFault
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.moments import file_of, kinds_of
from atoll.protocols.run.run_spec import RunSpec

log = logging.getLogger(__name__)


class InitialMoments:
    """The moments files of a run, as far as it has some and they are here."""

    def __init__(self, spec: RunSpec, paths: Sequence[str]) -> None:
        """`paths`: where the files are, or will be, in their order."""
        self._spec = spec
        self._paths = dict(enumerate(map(Path, paths)))

    def load_into(self, learner: Learner, feedback: ErrorFeedback) -> None:
        """Give `learner` moments, and `feedback` residuals, of atoms that are trained and not stepped yet."""
        known = learner.inner.state()
        trained = learner.weights.trained()
        wanted = dict.fromkeys(atom for atom in trained if not _steps(known, atom))
        found: dict[str, Tensor] = {}
        for number, path in list(self._paths.items()):
            mine = [atom for atom in wanted if file_of(self._spec.model, atom) == number]
            if mine and path.exists():
                found |= self._read_or_drop(number, mine)
        if not found:
            return
        learner.inner.load(known | {name: value for name, value in found.items() if not name.startswith(ERROR)})
        for place in arena_of(self._spec.model).placements:
            if (error := found.get(f"{ERROR}/{place.name}")) is not None:
                write_atom(feedback.residual_C4096, place, error)

    def _read_or_drop(self, number: int, atoms: list[str]) -> dict[str, Tensor]:
        """Tensors of a file; none, and a line in the log, where it cannot be used: it is not tried again."""
        try:
            return self._read(number, atoms)
        except (DecodeError, DiskFault) as error:
            log.warning("the checkpoint's moments are not used: %s", error.line())
            del self._paths[number]
            return {}

    def _read(self, number: int, atoms: list[str]) -> dict[str, Tensor]:
        optimizer = self._spec.inner.optimizer
        specs = moment_specs(self._spec.model, optimizer, number)
        file = TensorFile(self._paths[number], specs, MOMENTS_NOTE)
        found: dict[str, Tensor] = {}
        for atom in atoms:
            for kind in (ERROR, *((STEP, *kinds_of(optimizer, atom)) if is_optimised(atom) else ())):
                name = f"{kind}/{atom}"
                found[name] = file.read(name)
                if not is_valid(name, found[name]):
                    raise DecodeError(f"{name} is not finite, or out of range")
        return found


def _steps(state: Mapping[str, Tensor], atom: str) -> int:
    """Number of Adam's steps with an atom."""
    found = state.get(f"{STEP}/{atom}")
    return 0 if found is None else int(found)
