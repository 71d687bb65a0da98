"""The worker's work: one run's model, data, optimiser, error feedback and fold, composed.

Holds 4 bytes per trained value each for the error feedback, the local weights and their anchor, and 8 for Adam;
Θ_final and the view are mapped files. The device of error feedback and anchor is chosen by `encoder_choice`. After
each trained round everything but the view is saved in one generation (`state/`), while the next round is trained
(`async_save`); the moments with every eighth one (`moment_saves`). A Finalize is saved with the next trained
round, or at once if saving takes a small share of the time: were it lost, the daemon would ask for it again, and
it gives the same bits.

Every ask may be asked again after a DiskFault: what it did in memory is done once, the saving is repeated.
"""

import os
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np
import torch

from atoll.node.checkpoint.disk import map_payload
from atoll.node.checkpoint.mapped_arrays import ARRAYS, MappedArrays
from atoll.node.config.devices import devices_of
from atoll.node.ipc.time_budget import TimeBudget
from atoll.node.learning.compress.codecs import codec_of
from atoll.node.learning.data.dataset import Dataset, GivenTokenizer, RunText, open_text
from atoll.node.learning.data.shakespeare import default_cache
from atoll.node.learning.inner.evaluate import VAL_WINDOWS
from atoll.node.learning.inner.private_passes import Random
from atoll.node.learning.outer.average import StateAverage
from atoll.node.learning.plugged.loading import examples_of
from atoll.node.worker.audits.measuring import audit
from atoll.node.worker.audits.replays import SentPayloads
from atoll.node.worker.encoding.encoder_choice import encoder_for
from atoll.node.worker.error_feedback import ErrorFeedback
from atoll.node.worker.folding.fold_requests import FoldRequests, fold_of
from atoll.node.worker.folding.reduction_work import slice_work_of
from atoll.node.worker.folding.set_update import SetUpdate, require_slices
from atoll.node.worker.imports.lean_torch import whole_torch
from atoll.node.worker.initial_moments import InitialMoments
from atoll.node.worker.learner import Learner
from atoll.node.worker.multi_device.group import take_device
from atoll.node.worker.multi_device.lead import Ranks, end_process, threads_of
from atoll.node.worker.multi_device.modes import check_devices
from atoll.node.worker.multi_device.replica import StepMemory
from atoll.node.worker.objectives.step_term import objective_of
from atoll.node.worker.privacy.uses import PrivacyAccount
from atoll.node.worker.round_trainer import RoundTrainer, Step
from atoll.node.worker.schedule.async_save import AsyncSave, WorkerState
from atoll.node.worker.schedule.precompile import KernelsBeside
from atoll.node.worker.schedule.time_account import TimeAccount
from atoll.node.worker.zeroth_order.scalar_steps import ScalarSteps
from atoll.p2p.blobs.store import BLOBS
from atoll.protocols import codec
from atoll.protocols.errors import AtollError, ConfigError, DiskFault
from atoll.protocols.ids import Round
from atoll.protocols.local import worker_messages
from atoll.protocols.local.contribution_forms import age_of
from atoll.protocols.pulls.requests import DifferenceRequest, MixRequest
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.run_spec import RunSpec
from atoll.protocols.run.sections.zeroth_order import is_scalar

TOKENS = "tokens"
"""File of the text's tokens, in a run's folder."""
SAVE_SHARE = 0.01
"""Most of the time that goes into saving between two trained rounds."""
Event: TypeAlias = Step | worker_messages.TrainReply
"""Result of one step of `train`."""


class Session:
    """Everything that one worker does for one run."""

    def __init__(
        self,
        start: worker_messages.StartRequest,
        spent: TimeAccount | None = None,
        saves: TimeBudget | None = None,
        saved: Callable[[], None] = lambda: None,
        lost: Callable[[str], None] = end_process,
        report: Callable[[str], None] = lambda phase: None,
        random: Random = os.urandom,
        text: Dataset | None = None,
    ) -> None:
        """Build everything and load what is on disk. Raises ConfigError, CorruptFault, DiskFault.

        `spent`: the worker's account of time. `saves`: budget of saves between trained rounds. `saved` is called,
        by another thread, when `finish_save` may have an answer; `lost` too, with a line, when the process of
        another device is gone. `report` is given each phase of the start as it begins. `random`: of the noise of a
        run with privacy; it must not be repeatable but in tests. `text`: see `text_for`.
        """
        self._start = start
        self._spent = spent or TimeAccount(time.monotonic_ns)
        self._save_budget = saves or TimeBudget(SAVE_SHARE)
        self._is_saved = True
        self._is_training = False
        self._trained: worker_messages.TrainReply | None = None
        """The newest result since this process began."""
        self._async_save = AsyncSave(saved)
        self._spec = codec.decode(start.spec, RunSpec)
        if self._spec.model.plugin or self._spec.objective:
            whole_torch()
        if start.trains and self._spec.objective:
            objective_of(self._spec)  # what cannot be loaded is said now, not at the first step
        self._random = random
        self._data: RunText | None = text
        layout = codec_of(self._spec.compress.codec, self._spec.compress.k).layout(
            arena_of(self._spec.model).chunks
        )
        self._sent = SentPayloads(layout, np.random.default_rng())
        self._build(lost, report)
        report("reading the saved state")
        self._state.restore()
        if self._spec.privacy and start.trains:
            self._rounds.privacy = PrivacyAccount(self._spec.privacy, Path(start.home), self._text)
            self._rounds.privacy.check(self._rounds.steps_taken)

    def _build(self, lost: Callable[[str], None], report: Callable[[str], None]) -> None:
        start, spec, home = self._start, self._spec, Path(self._start.home)
        threads, devices = max(1, start.threads), devices_of(start.device)
        torch.set_num_threads(threads_of(threads, devices) if devices[0] == "cpu" else threads)
        take_device(devices[0], start.gpu_memory)
        check_devices(spec, len(devices))
        # Its processes start first: they load torch while this one compiles and opens the data.
        self._ranks = Ranks(start, spec, lost) if len(devices) > 1 else None
        report("loading or compiling kernels")
        self._kernels = KernelsBeside(spec)
        if start.reads_text and self._data is None:
            report("opening the text")
            self._data = self._open_text(home)
        if self._ranks is not None:
            self._ranks.join()
        report("building the model")
        encoder = encoder_for(spec, start)
        self._learner = Learner(
            spec,
            devices[0],
            start.frozen,
            start.frozen_on_host,
            self._ranks,
            anchor_on=encoder.device,
            memory=StepMemory(start.micro_batch, start.recompute, start.quantized),
            base=Path(start.base) if start.base else None,
            random=self._random,
        )
        self._slices = slice_work_of(spec, map_payload, home / "spool")
        arrays = MappedArrays(home / ARRAYS)
        update = SetUpdate(spec, self._slices, threads, arrays.fresh)
        self._fold = fold_of(spec, update, threads, arrays.fresh, begins=False)
        self._feedback = ErrorFeedback(spec, home / "spool", encoder)
        self._rounds = RoundTrainer(
            spec=spec,
            peer=start.peer,
            data=self._data,
            learner=self._learner,
            fold=self._fold,
            feedback=self._feedback,
            spent=self._spent,
            moments=InitialMoments(spec, start.moments),
            scalars=ScalarSteps(spec, start.peer, self._learner) if is_scalar(spec) else None,
        )
        self._requests = FoldRequests(
            spec, start.peer, self._fold, self._feedback, self._slices, self._async_save.payloads
        )
        self._state = WorkerState(
            spec=spec,
            peer=start.peer,
            folder=home / "state",
            arrays=arrays,
            fold=self._fold,
            learner=self._learner,
            feedback=self._feedback,
            slices=self._slices,
            rounds=self._rounds,
            trains=(start.trains or self._ranks is not None) and not is_scalar(spec),
            average=StateAverage(start.average_rounds, arrays.fresh),
        )

    def _open_text(self, home: Path) -> RunText:
        start, spec = self._start, self._spec
        given = GivenTokenizer(Path(start.tokenizer), spec.model.vocab) if start.tokenizer else None
        kept = home / TOKENS
        return open_text(spec, start.data, default_cache(), home / BLOBS, given, examples_of, kept)

    def started(self) -> worker_messages.StartReply:
        """The reply to StartRequest: the state that was found on disk."""
        return worker_messages.StartReply(
            final=self._fold.final_round,
            state=self._fold.state_digest(),
            pending=self._feedback.pending,
            parameters=self._spec.model.parameters,
            device=self._start.device,
            experts=self._learner.experts,
            settled=self._state.settled,
            uses=self._rounds.uses,
        )

    def text_for(self, start: worker_messages.StartRequest) -> Dataset | None:
        """Return the text in memory, if it is that of another session too: most of its start is to read it."""
        return self._data if isinstance(self._data, Dataset) and start == self._start else None

    def answer(self, ask: worker_messages.Ask) -> worker_messages.Answer:
        """Do everything but training. Raises AtollError."""
        if isinstance(ask, worker_messages.FoldAsk):
            return self.prepare(ask)()
        if not isinstance(ask, worker_messages.JudgeRequest | worker_messages.AdoptRequest):
            self._requests.check_begun()
        match ask:
            case worker_messages.OpenRequest():
                return require_slices(self._slices).open(ask)
            case worker_messages.JudgeRequest():
                return require_slices(self._slices).judge(ask)
            case worker_messages.ReduceRequest():
                reduced = require_slices(self._slices).reduce(ask, self._feedback.residual_C4096)
                self._save_between_rounds()
                return reduced
            case worker_messages.AdoptRequest():
                adopted = self._requests.adopt(ask)
                self._state.average.add(self._fold.final_C4096, self._fold.final_round)
                self._save()
                return adopted
            case worker_messages.SnapshotRequest(path):
                return self._requests.write_snapshot(Path(path))
            case worker_messages.InheritRequest(expert, path):
                return worker_messages.InheritReply(self._learner.inherit(expert, bytes(map_payload(path))))
            case worker_messages.EvaluateRequest():
                return self._evaluate()
            case worker_messages.AuditRequest():
                return self._audit(ask)
            case DifferenceRequest() if self._rounds.mixing is not None:
                return self._rounds.mixing.write(ask, self._learner.weights)
            case MixRequest() if self._rounds.mixing is not None:
                return self._rounds.mixing.mix(ask, self._learner.weights)
        raise AtollError(f"the worker has no answer to {type(ask).__name__}")

    def prepare(self, ask: worker_messages.FoldAsk) -> Callable[[], worker_messages.Answer]:
        """The work of a request about the fold, which changes nothing; the result makes the change and answers.

        May run beside the steps of `train`, in another thread; the result is called between two steps. In
        between, nothing but `train` and `finish_save` may be done here. Both raise AtollError.
        """
        return self._requests.prepare(ask, self._save_between_rounds)

    def train(self, ask: worker_messages.TrainRequest) -> Generator[Event, None, None]:
        """The round's inner steps, one at a time, then the encoded and saved result.

        None means that nothing can be done before another ask was answered. The error feedback goes into the
        round's payload, so contributions of a newer state than this are recognised before it, not when they are
        folded.
        """
        if not self._start.trains:
            raise AtollError("this worker was started without training")
        self._requests.check_begun()
        self._requests.recognise(ask.said)
        if self._trained is not None and _is_of(self._trained.pending, ask.round):
            if self._async_save.holds(self._trained.pending.round):  # the disk did not take it
                self._begin_save()
            yield self._trained
            return
        self._is_training = True
        try:
            trained, payload = yield from self._rounds.train(ask)
        except BaseException:  # it is given up, whatever the reason
            self._spent.discard()
            raise
        finally:
            self._is_training = False
        self._end_save()  # of the round before: its sweep knows nothing of the files of this one
        self._spent.begin_save()
        trained = msgspec.structs.replace(trained, parted=self._release_moments(trained.pending.round))
        self._feedback.add(trained.pending)
        self._state.moment_saves.trained_round()
        self._async_save.add(trained, payload)
        self._trained = trained
        self._begin_save()
        yield trained

    def is_reported(self, step: int) -> bool:
        """Whether progress at this step of a round must reach the daemon, however soon after other progress."""
        return self._rounds.mixing is not None and self._rounds.mixing.is_reported(step)

    def finish_save(self, ask: worker_messages.SaveRequest) -> worker_messages.SaveReply | None:
        """Whether a trained round is safe. None: look again after `saved`. Raises DiskFault; then ask again."""
        if self._async_save.is_busy:
            return None
        self._end_save()
        self._async_save.check()
        if not self._async_save.holds(ask.round):
            return worker_messages.SaveReply()
        self._begin_save()
        return None

    def close(self) -> None:
        """Save what is not saved yet, of a round at hand the moments alone. Raises CorruptFault, DiskFault."""
        self._kernels.end()
        self._end_save()
        if not self._is_saved and (not self._is_training or self._async_save.payloads()):
            self._save(with_moments=not self._is_training)
        elif self._state.moment_saves.are_old and self._is_saved:
            self._state.save_moments()
        if self._ranks is not None:
            self._ranks.close()

    def _release_moments(self, number: Round) -> tuple[worker_messages.ReleasedMoments, ...]:
        """Write the moments of experts given up. No round is worth them: where the disk refuses, they are gone."""
        moments, self._learner.released = self._learner.released, {}
        try:
            return self._feedback.write_released(number, moments)
        except DiskFault:
            return ()

    @property
    def _text(self) -> RunText:
        """Raises ConfigError where the worker was started without the text."""
        if self._data is None:
            raise ConfigError(
                "this node reads no text, so it cannot validate", hint="start it with --role evaluate"
            )
        return self._data

    def _evaluate(self) -> worker_messages.EvaluateReply:
        began = time.monotonic()
        val_WT1, val_bytes = self._text.validation(VAL_WINDOWS), self._text.validation_bytes(VAL_WINDOWS)
        found = self._learner.evaluate(self._fold.view_C4096, val_WT1, val_bytes)
        return worker_messages.EvaluateReply(
            self._fold.view_digest(), found.val_bpb, found.val_loss, time.monotonic() - began
        )

    def _audit(self, ask: worker_messages.AuditRequest) -> worker_messages.AuditReply:
        with self._spent.within("audit"):
            found = audit(
                ask,
                self._spec,
                self._text,
                self._learner.window_losses,
                self._fold.final_C4096,  # not the view: another node repeats the audit at the same state
                np.random.default_rng(ask.seed),
                self._learner.squared_gradients(),
                self._sent,
            )
        return msgspec.structs.replace(found, at=self._fold.final_round)

    def _save_between_rounds(self) -> None:
        """Save now if the budget allows it. A round that is being trained saves everything when it ends.

        The run's last state is saved at once: no round follows that would save it, and it is what users export.
        """
        self._is_saved = False
        self._state.average.add(self._fold.final_C4096, self._fold.final_round)
        is_last = self._fold.final_round == self._spec.outer.rounds - 1
        if not self._is_training and (is_last or self._save_budget.is_due(time.monotonic())):
            self._save(with_moments=is_last)

    def _save(self, with_moments: bool = False) -> None:
        """Save everything and wait for the disk; the moments at least if they are due. Raises DiskFault."""
        began = time.monotonic()
        self._begin_save(with_moments)
        self._end_save()
        self._async_save.check()
        self._save_budget.took(time.monotonic(), time.monotonic() - began)

    def _begin_save(self, with_moments: bool = False) -> None:
        """Save everything as it is now. Raises DiskFault where the disk refuses at once."""
        began = time.monotonic()
        self._end_save()
        self._is_saved = False
        with self._spent.within("checkpoint"):
            generation, pending = self._state.begin_generation(with_moments), self._feedback.pending
            past = self._feedback.past
        self._is_saved = True

        def finish() -> None:
            generation.finish()
            self._state.moment_saves.end()
            self._feedback.sweep(pending, past)

        self._async_save.begin(finish, generation.drop)
        self._save_budget.took(time.monotonic(), time.monotonic() - began)

    def _end_save(self) -> None:
        """Wait for the save that is under way, if one is."""
        with self._spent.within("checkpoint"):
            went_well = self._async_save.wait()
        if went_well:
            self._spent.confirm_saved()
        elif went_well is not None:
            self._is_saved = False


def _is_of(pending: worker_messages.Pending, number: Round) -> bool:
    """Whether this work was trained in round `number`: it spans several where its base is older than its round."""
    return pending.round - age_of(pending) <= number <= pending.round
