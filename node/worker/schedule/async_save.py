"""Saving and restoring the worker's state; trained rounds go to the disk while the next one is trained.

The kernel has the bytes when a save begins: from then on the tensors may change. Waiting for the disk is left to a
thread, for one save at a time. A round is safe, and may be announced, when the save that holds it has ended well.
"""

import logging
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from atoll.node.checkpoint import generations
from atoll.node.checkpoint.disk import write_file
from atoll.node.checkpoint.generations import Rare, SavedArray, Unfinished
from atoll.node.checkpoint.local import (
    AVERAGE,
    FINAL,
    SAVED,
    LocalBody,
    LocalState,
    begin_local,
    check_saved,
    load_local,
)
from atoll.node.checkpoint.mapped_arrays import MappedArrays
from atoll.node.checkpoint.tensorfile import all_finite
from atoll.node.ipc.chain_mark import ASIDE, ChainMark
from atoll.node.learning.compress.feedback.memory import MEMORY
from atoll.node.learning.outer.average import StateAverage
from atoll.node.learning.outer.fixed import state_digest, state_header
from atoll.node.learning.outer.fold import Fold
from atoll.node.worker.error_feedback import ErrorFeedback
from atoll.node.worker.folding.fold_requests import begin_fold
from atoll.node.worker.folding.reduction_work import SliceWork
from atoll.node.worker.learner import Learner, experts_among
from atoll.node.worker.local_weights import carries
from atoll.node.worker.round_trainer import RoundTrainer
from atoll.node.worker.schedule.moment_saves import MomentSaves
from atoll.protocols.errors import AtollError, CorruptFault
from atoll.protocols.ids import Digest, PeerId
from atoll.protocols.local.worker_messages import TrainReply
from atoll.protocols.run.run_spec import RunSpec

log = logging.getLogger(__name__)


class AsyncSave:
    """The rounds that are trained and not safe yet, with their payloads until these are files."""

    def __init__(self, ended: Callable[[], None]) -> None:
        """`ended` is called when a save has ended, well or not, from its thread."""
        self._ended = ended
        self._threads = ThreadPoolExecutor(1, "save")
        self._running: Future[None] | None = None
        self._unsafe: dict[int, tuple[TrainReply, bytearray]] = {}
        self._saving: tuple[int, ...] = ()
        """Rounds that the newest save holds."""
        self._fault: AtollError | None = None

    def add(self, trained: TrainReply, payload: bytearray) -> None:
        """The next save holds this round too."""
        self._unsafe[trained.pending.round] = (trained, payload)

    def holds(self, number: int) -> bool:
        """Whether this round is not safe yet."""
        return number in self._unsafe

    def payloads(self) -> dict[Digest, bytearray]:
        """Payloads that may not be files yet."""
        return {done.pending.payload: payload for done, payload in self._unsafe.values()}

    def begin(self, finish: Callable[[], None], drop: Callable[[], None]) -> None:
        """Put the payloads on the disk, then `finish` the save, beside what the caller does. See `wait`.

        `drop` instead where a payload could not be written.
        """
        assert self._running is None, "one save at a time"
        self._saving = tuple(self._unsafe)
        files = [(Path(done.pending.path), payload) for done, payload in self._unsafe.values()]

        def work() -> None:
            try:
                for path, payload in files:
                    write_file(path, [memoryview(payload)])
            except BaseException:
                drop()
                raise
            finish()

        self._running = self._threads.submit(work)
        self._running.add_done_callback(lambda _: self._ended())

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way."""
        return self._running is not None and not self._running.done()

    def wait(self) -> bool | None:
        """Until no save is under way. Whether it ended well: what it held is safe now. None: there was none."""
        running, self._running = self._running, None
        if running is None:
            return None
        error = running.exception()
        if error is not None and not isinstance(error, AtollError):
            raise error
        self._fault = error
        if error is None:
            self._unsafe = {number: each for number, each in self._unsafe.items() if number not in self._saving}
        return error is None

    def check(self) -> None:
        """Raise what went wrong in the save before, once."""
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault


@dataclass(kw_only=True, slots=True)
class WorkerState:
    """What a restart must find again, collected from the parts of a session: one generation, whole or not at all.

    The view is not in it: it follows from Θ_final and the sets, which the daemon gives again.
    """

    spec: RunSpec
    peer: PeerId
    folder: Path
    """Where the generations are."""
    arrays: MappedArrays
    """Where the states of the fold are."""
    fold: Fold
    learner: Learner
    feedback: ErrorFeedback
    slices: SliceWork | None
    rounds: RoundTrainer
    trains: bool = True
    """Whether this worker will train its local weights; zeroth-order steps make theirs afresh from the view."""
    average: StateAverage = field(default_factory=StateAverage)
    """Of the final states; saved beside Θ_final, of the same round."""
    moment_saves: MomentSaves = field(default_factory=MomentSaves)
    settled: int = -1
    """See LocalBody."""

    def begin_generation(self, with_moments: bool = False) -> Unfinished:
        """Hand everything as it is now to the kernel; Θ_final may not change before the result's `finish`.

        Raises DiskFault. `with_moments`: also if they are not due.
        """
        weights = self.learner.weights
        carried = carries(self.spec) and not weights.is_scratch
        body = LocalBody(
            run=self.spec.id,
            final=self.fold.final_round,
            state=self.fold.state_digest(),
            steps=self.rounds.steps_taken,
            pending=self.feedback.pending,
            sent=weights.sent if carried else -1,
            sent_experts=weights.sent_experts if carried else b"",
            kept=self.slices.words() if self.slices is not None else (),
            past=self.feedback.past,
            newest=self.feedback.newest,
            settled=self.settled,
            left=tuple(sorted(self.feedback.left)),
            author=self.peer,
        )
        moments, kind = self._moments()
        writes = self.moment_saves.begin(kind, forced=with_moments)
        final, states = self._states(body.state)
        tensors = {
            **final,
            "residual": self.feedback.residual_C4096,
            **(self.feedback.memory.tensors() if self.feedback.memory is not None else {}),
            **(self.slices.tensors() if self.slices is not None else {}),
            **(weights.tensors() if carried else {}),
        }
        return begin_local(self.folder, body, tensors, final.keys(), states, moments, not writes)

    def save_moments(self) -> None:
        """Save the newest generation again, with the moments as they are now. Raises CorruptFault, DiskFault."""
        moments, kind = self._moments()
        self.moment_saves.begin(kind, forced=True)
        generations.begin_rare(self.folder, moments).finish()
        self.moment_saves.end()

    def _moments(self) -> tuple[Rare, Hashable]:
        """The moments, and what is equal as long as only steps change them."""
        moments, parts = self.learner.moments()
        return Rare(moments, parts), (self.learner.moment_changes, frozenset(moments))

    def _states(self, state: Digest) -> tuple[dict[str, Tensor], dict[str, SavedArray]]:
        """Θ_final and the average as tensors to write, or as the files that they are in already."""
        found, average = {FINAL: (self.fold.final_state_S4096, state)}, self.average.values_C4096
        if average is not None:
            found[AVERAGE] = average, state_digest(average)
        written, named = {}, {}
        for name, (values_S4096, hashed) in found.items():
            path = self.arrays.path_of(values_S4096)
            if path is None:
                written[name] = values_S4096
            else:
                named[name] = SavedArray(values_S4096, path, state_header(len(values_S4096)), hashed)
        return written, named

    def restore(self) -> None:
        """Load the newest generation that verifies, if there is one. Raises CorruptFault, DiskFault.

        If the node leaves the chain that its Θ_final is of, everything else is loaded, and saved as the newest
        generation; those before it go to `state-aside`.
        """
        home = self.folder.parent
        found = load_local(self.folder, self.spec.id, self._check)
        if found is not None and found.body.author not in ("", self.peer):
            # Its author may run as well, and would send the same.
            log.warning("the saved state is of %s: what that node has yet to send is dropped", found.body.author)
            found = _without_work(found)
        # Who trained before finds its unsent work again when it trains again.
        is_kept = found is not None and self.learner.weights.are_in(found.tensors)
        self.learner.weights.is_scratch = not (self.trains or is_kept)
        first = (mark := ChainMark(home)).first()
        if found is None:
            begin_fold(self.spec, self.fold, self.arrays.fresh)
            self.learner.weights.start(self.fold.view_C4096)
        else:
            for line in found.report:
                log.warning("%s", line)
            self._load(found, first)
        if first is None:
            return
        # A kill between any two of these steps repeats them: what was left once has nothing more to leave.
        if found is not None and found.body.final >= first:
            self.begin_generation().finish()
        if found is not None and self.fold.final_round < 0:
            generations.move_older(self.folder, home / ASIDE)
        mark.remove(first)

    def _load(self, found: LocalState, first: int | None) -> None:
        """Load a generation, without its Θ_final if the chain is left at round `first` or before."""
        body, leaves = found.body, first is not None and found.body.final >= first
        self.feedback.load(found.tensors["residual"], body, found.tensors)
        self.settled = body.settled
        if leaves and first is not None:
            begin_fold(self.spec, self.fold, self.arrays.fresh)
            self.feedback.reopen(first)
            self.settled = first - 1
        elif body.final > self.fold.final_round:
            self._load_final(found)
        # What our Reductions left out was of the rounds of that chain: their authors have it back.
        if self.slices is not None and not leaves:
            self.slices.load(body.kept, found.tensors, body.final)
        self.rounds.steps_taken = body.steps
        self.learner.set_trained_experts(experts_among(found.tensors, self.spec))
        weights = self.learner.weights
        if weights.are_in(found.tensors):
            weights.load(found.tensors, found.body.sent, found.body.sent_experts, self.fold.view_C4096)
        else:  # all that moved them is sent, or they were the view
            weights.start(self.fold.view_C4096)
            weights.sent, weights.sent_experts = body.sent, body.sent_experts
        others = (FINAL, AVERAGE, "residual", "kept", MEMORY, *SAVED)
        self.learner.inner.load({name: t for name, t in found.tensors.items() if not name.startswith(others)})

    def _load_final(self, found: LocalState) -> None:
        # The hash of an array was looked at, and is its state digest.
        known = found.body.state if FINAL in found.arrays else None
        self.fold.adopt(self._opened(found, FINAL), found.body.final, known)
        if AVERAGE in found.tensors:
            self.average.load(self._opened(found, AVERAGE), found.body.final)

    def _opened(self, found: LocalState, name: str) -> Tensor:
        values_S4096 = found.tensors[name]
        return self.arrays.opened(found.arrays[name], values_S4096) if name in found.arrays else values_S4096

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise CorruptFault for what no worker of this run saved: bytes may be whole and still be wrong."""
        residual = tensors.get("residual")
        shape = self.feedback.residual_C4096.shape
        if FINAL not in tensors or residual is None or residual.shape != shape:
            raise CorruptFault("the saved state is of another model")
        average = tensors.get(AVERAGE)
        if average is not None and (average.dtype, average.shape) != (torch.int32, self.fold.final_C4096.shape):
            raise CorruptFault("the saved average is of another model")
        if not all_finite(residual):  # encoding must be able to rely on it
            raise CorruptFault("the saved error feedback holds NaN or infinity")
        if self.feedback.memory is not None:
            self.feedback.memory.check(tensors)
        check_saved(tensors, self.spec)


def _without_work(found: LocalState) -> LocalState:
    """The state without what its author has yet to send, or would send again."""
    body = msgspec.structs.replace(
        found.body, pending=(), sent=-1, sent_experts=b"", kept=(), past=(), left=(), author=PeerId("")
    )
    kept = {name: t for name, t in found.tensors.items() if not name.startswith((*SAVED, MEMORY, "kept"))}
    return found._replace(body=body, tensors={**kept, "residual": torch.zeros_like(found.tensors["residual"])})
