"""The worker's work: one run's model, data, optimiser, error feedback and fold, composed.

Holds 4 bytes per value each for Θ_final, the view, the error feedback, the local weights and their anchor, and 8
for Adam; where error feedback and anchor are is chosen by `node/worker/encoder_choice.py`. Everything but
the view is saved in
one generation (`state/`), whole or not at all, after each trained round; the local weights and the anchor only
where they are more than the view. The next round is trained while the disk still works at it
(`node/worker/async_save.py`).
A Finalize is saved with the next trained round, or at once if saving takes a small share of the time: were it
lost, the daemon would ask for it again, and it gives the same bits.

Every ask may be asked again after a DiskFault: what it did in memory is done once, the saving is repeated.
"""

import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

import msgspec
import torch
from torch import Tensor

from atoll.node.checkpoint import local, snapshot
from atoll.node.checkpoint.atoms import all_finite
from atoll.node.checkpoint.disk import disk, map_file
from atoll.node.checkpoint.generations import Unfinished
from atoll.node.config.devices import devices_of
from atoll.node.ipc.time_budget import TimeBudget
from atoll.node.learning.compress.codecs import codec_of
from atoll.node.learning.compress.covering import Rows, rows_of
from atoll.node.learning.compress.folding import OuterStep as OuterStep
from atoll.node.learning.data.cache import default_cache
from atoll.node.learning.data.dataset import GivenTokenizer, open_dataset
from atoll.node.learning.inner.evaluate import VAL_WINDOWS
from atoll.node.learning.model import bridge
from atoll.node.learning.model.genesis import genesis
from atoll.node.learning.model.merging import merge_after_round
from atoll.node.learning.outer.fixed import plus, state_digest
from atoll.node.learning.outer.fold import Fold, Part
from atoll.node.worker.async_save import Keeping
from atoll.node.worker.encoder_choice import encoder_for
from atoll.node.worker.error_feedback import ErrorFeedback, Missed
from atoll.node.worker.initial_moments import Brought
from atoll.node.worker.learner import Learner, experts_among
from atoll.node.worker.local_weights import carries, check_saved
from atoll.node.worker.multi_device.group import check_device
from atoll.node.worker.multi_device.lead import Ranks, end_process, threads_of
from atoll.node.worker.precompile import warm
from atoll.node.worker.reduction_work import SliceWork
from atoll.node.worker.round_trainer import RoundTrainer, Step
from atoll.node.worker.time_account import TimeAccount
from atoll.protocols import codec
from atoll.protocols.errors import AtollError, CorruptFault, DecodeError, DiskFault, LocalFault, Superseded
from atoll.protocols.ids import Digest, Round
from atoll.protocols.ledger.coverage import Cover, cover_of, size_of
from atoll.protocols.ledger.reduction import rules_of
from atoll.protocols.ledger.rows import check_root
from atoll.protocols.local.worker_messages import (
    NOTHING_YET,
    AdoptReply,
    AdoptRequest,
    Answer,
    Ask,
    CheckReply,
    CheckRequest,
    EvaluateReply,
    EvaluateRequest,
    FinalizeReply,
    FinalizeRequest,
    FoldAsk,
    FoldReply,
    FoldRequest,
    InheritReply,
    InheritRequest,
    JudgeRequest,
    Member,
    OpenRequest,
    ReduceRequest,
    ReleasedMoments,
    SaveReply,
    SaveRequest,
    SnapshotReply,
    SnapshotRequest,
    StartReply,
    StartRequest,
    TrainReply,
    TrainRequest,
    VerifyReply,
    VerifyRequest,
)
from atoll.protocols.run.arena import CHUNK, Span, arena_of
from atoll.protocols.run.run_spec import RunSpec

SAVE_SHARE = 0.01
"""Of the time, at most, goes into saving between two trained rounds."""
Event: TypeAlias = Step | TrainReply
"""What a step of `train` gives."""


class Session:
    """One run in one worker."""

    def __init__(
        self,
        start: StartRequest,
        spent: TimeAccount | None = None,
        saves: TimeBudget | None = None,
        saved: Callable[[], None] = lambda: None,
        lost: Callable[[str], None] = end_process,
    ) -> None:
        """Build everything and load what is on disk. Raises ConfigError, CorruptFault, DiskFault.

        `spent`: the worker's books of time; what takes none of the asker's kind is named there.
        `saves`: of what is not a trained round. `saved` is called, by another thread, when `keep` has news;
        `lost` too, with a line, when the process of another device is gone.
        """
        threads, devices = max(1, start.threads), devices_of(start.device)
        torch.set_num_threads(threads_of(threads, devices) if devices[0] == "cpu" else threads)
        self._start = start
        self._spent = spent or TimeAccount(time.monotonic_ns)
        self._saves = saves or TimeBudget(SAVE_SHARE)
        self._is_saved = True
        self._spec = spec = codec.decode(start.spec, RunSpec)
        self._home = Path(start.home)
        self._arena = arena_of(spec.model)
        check_device(devices[0])
        self._ranks = Ranks(start, spec, lost) if len(devices) > 1 else None
        self._codec = codec_of(spec.compress.codec, spec.compress.k)
        warm(self._codec)
        given = GivenTokenizer(Path(start.tokenizer), spec.model.vocab) if start.tokenizer else None
        self._data = open_dataset(spec.data, spec.model.context, start.data, default_cache(), given)
        if self._ranks is not None:
            self._ranks.join()
        encoder = encoder_for(spec, start)
        frozen = start.frozen, start.frozen_on_host
        self._learner = Learner(spec, devices[0], *frozen, self._ranks, encoder.device)
        covers, after = partial(cover_of, spec), partial(merge_after_round, spec)
        theta, number = _first_state(spec)
        self._slices = self._slice_work()
        self._fold = Fold(theta, self._arena, self._onto, covers, number, after)
        self._sending = ErrorFeedback(spec, self._home / "spool", encoder)
        brought = Brought(spec, start.moments)
        self._rounds = RoundTrainer(
            spec, self._data, self._learner, self._fold, self._sending, self._spent, brought
        )
        self._is_training = False
        self._trained: TrainReply | None = None
        """The newest result of this life."""
        self._keeping = Keeping(saved)
        self._restore()

    def started(self) -> StartReply:
        """What was found on disk."""
        return StartReply(
            self._fold.final_round,
            self._fold.state_digest(),
            self._sending.pending,
            self._spec.model.parameters,
            self._start.device,
            self._learner.experts,
        )

    def answer(self, ask: Ask) -> Answer:
        """Do everything but training. Raises AtollError."""
        if isinstance(ask, FoldAsk):
            return self.prepare(ask)()
        if not isinstance(ask, JudgeRequest | AdoptRequest):
            self._check_begun()
        match ask:
            case ReduceRequest() | OpenRequest() | JudgeRequest():
                return self._on_slices(ask)
            case AdoptRequest():
                return self._adopt(ask)
            case SnapshotRequest(path):
                return self._snapshot(Path(path))
            case InheritRequest(expert, path):
                return InheritReply(self._learner.inherit(expert, bytes(self._map(path))))
            case EvaluateRequest():
                return self._evaluate()
        raise AtollError(f"the worker has no answer to {type(ask).__name__}")

    # --- training -------------------------------------------------------------------------------

    def train(self, ask: TrainRequest) -> Generator[Event, None, None]:
        """The round's inner steps, one at a time, then the encoded and saved result.

        None means that nothing can be done before another ask was answered. The round is encoded from what is
        unsaid: so contributions of a newer state than this are recognised before it, not when they are folded.
        """
        self._check_begun()
        self._recognise(ask.said)
        if self._trained is not None and self._trained.pending.round == ask.round:
            if self._keeping.holds(ask.round):  # the disk did not take it
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
        self._spent.hand_over()
        trained = msgspec.structs.replace(trained, parted=self._part(trained.pending.round))
        self._sending.add(trained.pending)
        self._keeping.add(trained, payload)
        self._trained = trained
        self._begin_save()
        yield trained

    def _part(self, number: Round) -> tuple[ReleasedMoments, ...]:
        """Moments of what was given up. No round is worth them: where the disk refuses, they are gone."""
        moments, self._learner.parted = self._learner.parted, {}
        try:
            return self._sending.part(number, moments)
        except DiskFault:
            return ()

    def keep(self, ask: SaveRequest) -> SaveReply | None:
        """Whether a trained round is safe. None: look again after `saved`. Raises DiskFault; then ask again."""
        if self._keeping.is_busy:
            return None
        self._end_save()
        self._keeping.check()
        if not self._keeping.holds(ask.round):
            return SaveReply()
        self._begin_save()
        return None

    # --- the fold -------------------------------------------------------------------------------

    def prepare(self, ask: FoldAsk) -> Callable[[], Answer]:
        """The work of an ask about the fold. It changes nothing: that, and the answer, is the result's to do.

        May run beside the steps of `train`, in another thread; the result is called between two steps. In
        between, nothing but `train` and `keep` may be done here. Both raise AtollError.
        """
        if not isinstance(ask, VerifyRequest):
            self._check_begun()
        match ask:
            case VerifyRequest():
                verified = self._verify(ask)
                return lambda: verified
            case FoldRequest():
                return self._prepare_fold(ask)
            case CheckRequest():
                checked = self._check(ask)
                return lambda: checked
            case FinalizeRequest():
                return self._prepare_final(ask)

    def _verify(self, ask: VerifyRequest) -> VerifyReply:
        if ask.reduced:
            self._require_slices().check(self._map(ask.path), ask.rows, *ask.reduced)
            return VerifyReply()
        payload, layout = self._map(ask.path), self._sending.layout(ask.round, ask.experts)
        self._codec.check(payload, layout.chunks)
        if ask.rows:
            check_root(payload, layout, ask.rows)
        return VerifyReply()

    def _prepare_fold(self, ask: FoldRequest) -> Callable[[], Answer]:
        number = ask.round
        if number <= self._fold.final_round:  # a Finalize may have overtaken this request
            return lambda: FoldReply(number, self._fold.view_digest())
        commit = self._fold.prepare_round(number, self._parts(ask))

        def finish() -> Answer:
            self._recognise([number] if self._is_in(ask) else [])
            return FoldReply(number, commit())

        return finish

    def _check(self, ask: CheckRequest) -> CheckReply:
        number = ask.round
        if number <= self._fold.final_round:
            # Its payloads had to be fetched again, and meanwhile the round became final without this node.
            raise Superseded(f"round {number} is final already")
        return CheckReply(number, self._fold.check(number, self._parts(ask)))

    def _prepare_final(self, ask: FinalizeRequest) -> Callable[[], Answer]:
        number = ask.round
        # If it is this round's state already, it was done, but could not be saved.
        is_new = number != self._fold.final_round
        commit = self._fold.prepare_final(number, self._parts(ask)) if is_new else None

        def finish() -> Answer:
            if commit is not None:
                self._recognise([number] if self._is_in(ask) else [])
                counted = self._counted(ask)
                missed = self._sending.missed(number, counted, self._keeping.payloads)
                commit()
                self._settle(number, missed, counted)
            self._save_between_rounds()
            return FinalizeReply(number, self._fold.state_digest())

        return finish

    def _is_in(self, ask: FoldRequest | FinalizeRequest) -> bool:
        """Whether a contribution of ours is in the set."""
        named = (*ask.members, *(member for part in ask.slices for member in part.raw))
        ours = any(member.author == self._start.peer for member in named)
        return ours or any(part.ours for part in ask.slices)

    def _recognise(self, rounds: Iterable[int]) -> None:
        """These rounds, none final here, have contributions of ours: see `Sending.recognise`."""
        if not self._sending.recognise(max(rounds, default=-1)):
            line = "this state is older than what was sent: what it had not said yet is dropped"
            print(line, flush=True)  # noqa: T201 - stdout is the worker's log

    def _counted(self, ask: FinalizeRequest) -> dict[Digest, Cover]:
        """Our payloads in a final set, with the rows that count; Reductions of ours, too."""
        me = self._start.peer
        if not ask.slices:
            return {m.payload: self._all_rows(ask.round, m) for m in ask.members if m.author == me}
        spans = tuple(part.span for part in ask.slices if part.ours)
        ours = {p.payload: spans for p in self._sending.pending if p.round == ask.round}
        return ours | {m.payload: () for part in ask.slices for m in part.reduced if m.author == me}

    def _all_rows(self, number: Round, member: Member) -> Cover:
        return (Span(0, size_of(cover_of(self._spec, number, member.experts))),)

    def _settle(self, number: Round, missed: list[Missed], counted: Mapping[Digest, Cover]) -> None:
        self._sending.settle(number, missed)
        if self._slices is not None:
            self._slices.settle(number, counted, self._sending.residual_C4096)

    def _save_between_rounds(self) -> None:
        """A round that is being trained saves everything when it ends."""
        self._is_saved = False
        if not self._is_training and self._saves.is_due(time.monotonic()):
            self._save()

    def _on_slices(self, ask: ReduceRequest | OpenRequest | JudgeRequest) -> Answer:
        slices = self._require_slices()
        match ask:
            case OpenRequest():
                return slices.open(ask)
            case JudgeRequest():
                return slices.judge(ask)
        done = slices.reduce(ask, self._sending.residual_C4096)
        self._save_between_rounds()
        return done

    def _require_slices(self) -> SliceWork:
        if self._slices is None:
            raise AtollError("this run reduces no rounds")
        return self._slices

    def _slice_work(self) -> SliceWork | None:
        if self._spec.reduce is None:
            return None
        alpha_256, spool = self._spec.outer.alpha_256, self._home / "spool"
        return SliceWork(rules_of(self._spec), alpha_256, self._map, spool)

    def _adopt(self, ask: AdoptRequest) -> AdoptReply:
        if ask.round != self._fold.final_round:  # else: it was done, but could not be saved
            found = snapshot.read_snapshot(Path(ask.path), self._arena, state_digest)
            if found.round != ask.round or found.state != ask.state:
                raise DecodeError(
                    f"the snapshot is of round {found.round}, {found.state.hex()[:8]}; asked was another"
                )
            counted = {one.payload: one.spans for one in ask.included}
            self._recognise(one.round for one in ask.included if one.spans)
            missed = self._sending.missed(ask.round, counted, self._keeping.payloads)
            self._fold.adopt(found.theta_C4096, ask.round)
            self._settle(ask.round, missed, counted)
        self._save()
        return AdoptReply(ask.round, ask.state)

    def _snapshot(self, path: Path) -> SnapshotReply:
        state = snapshot.Snapshot(self._fold.final_C4096, self._fold.final_round, self._fold.state_digest())
        with disk(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        size = snapshot.write_snapshot(path, state, self._arena)
        return SnapshotReply(Round(self._fold.final_round), state.state, str(path), size)

    def _evaluate(self) -> EvaluateReply:
        began = time.monotonic()
        val_WT1, val_bytes = self._data.validation(VAL_WINDOWS), self._data.validation_bytes(VAL_WINDOWS)
        found = self._learner.evaluate(self._fold.view_C4096, val_WT1, val_bytes)
        return EvaluateReply(self._fold.view_digest(), found.val_bpb, found.val_loss, time.monotonic() - began)

    def _parts(self, ask: FoldRequest | CheckRequest | FinalizeRequest) -> list[Part]:
        whole = [Part(m.entry, m.weight, m.path, self._rows(ask.round, m)) for m in ask.members]
        reduced = [Part(m.entry, m.weight, m.path, None, s.span, True) for s in ask.slices for m in s.reduced]
        raw = [Part(m.entry, m.weight, m.path, None, s.span) for s in ask.slices for m in s.raw]
        return [*whole, *reduced, *raw]

    def _rows(self, number: Round, member: Member) -> Rows | None:
        if not member.experts:
            return None
        return rows_of(cover_of(self._spec, number, member.experts), cover_of(self._spec, number))

    def _map(self, path: str) -> memoryview:
        with disk(Path(path)):
            try:
                return map_file(Path(path))
            except FileNotFoundError as error:
                raise CorruptFault(f"{path} is gone", hint="it is fetched again from its holders") from error

    def _onto(self, parts: Sequence[Part], theta_N4096: Tensor) -> Tensor:
        if any(part.span is not None for part in parts):
            return plus(theta_N4096, self._require_slices().update(parts, len(theta_N4096)))
        members = [(part.weight, self._map(part.source), part.rows) for part in parts]
        outer = OuterStep(self._spec.outer.alpha_256, self._spec.outer.floor_256)
        return self._codec.onto(theta_N4096, members, outer, threads=max(1, self._start.threads))

    # --- the disk -------------------------------------------------------------------------------

    def close(self) -> None:
        """Save what is not saved yet, nothing of the round at hand, and end the ranks. Raises DiskFault."""
        self._end_save()
        if not self._is_saved and not self._is_training:
            self._save()
        if self._ranks is not None:
            self._ranks.close()

    def _save(self) -> None:
        """And wait for the disk."""
        began = time.monotonic()
        self._begin_save()
        self._end_save()
        self._keeping.check()
        self._saves.took(time.monotonic(), time.monotonic() - began)

    def _begin_save(self) -> None:
        """Everything as it is now. Raises DiskFault where the disk refuses at once."""
        began = time.monotonic()
        self._end_save()
        self._is_saved = False
        with self._spent.within("checkpoint"):
            generation, pending = self._generation(), self._sending.pending
        self._is_saved = True

        def finish() -> None:
            generation.finish()
            self._sending.sweep(pending)

        self._keeping.begin(finish, generation.drop)
        self._saves.took(time.monotonic(), time.monotonic() - began)

    def _end_save(self) -> None:
        """Wait for the save that is under way, if one is."""
        with self._spent.within("checkpoint"):
            went_well = self._keeping.wait()
        if went_well:
            self._spent.keep()
        elif went_well is not None:
            self._is_saved = False

    def _generation(self) -> Unfinished:
        carried, weights = carries(self._spec), self._learner.weights
        body = local.LocalBody(
            self._spec.id,
            self._fold.final_round,
            self._fold.state_digest(),
            self._rounds.steps_taken,
            self._sending.pending,
            weights.sent if carried else -1,
            weights.sent_experts if carried else b"",
            self._slices.words() if self._slices is not None else (),
        )
        tensors = {"final": self._fold.final_C4096, "residual": self._sending.residual_C4096}
        tensors |= self._slices.tensors() if self._slices is not None else {}
        more = weights.tensors() if carried else {}
        moments, parts = self._learner.moments()
        tensors |= {**more, **moments}
        return local.begin_local(self._home / "state", body, tensors, steady={"final"}, parts=parts)

    def _restore(self) -> None:
        found = local.load_local(self._home / "state", self._spec.id, self._check_saved)
        if found is None:
            self._learner.weights.start(self._fold.view_C4096)
            return
        for line in found.report:
            print(line, flush=True)  # noqa: T201 - stdout is the worker's log
        if found.body.final > self._fold.final_round:
            self._fold.adopt(found.tensors["final"], found.body.final)
        self._sending.load(found.tensors["residual"], found.body.pending, found.body.final)
        if self._slices is not None:
            self._slices.load(found.body.kept, found.tensors.get("kept"), found.body.final)
        self._rounds.steps_taken = found.body.steps
        self._learner.own(experts_among(found.tensors, self._spec))
        weights = self._learner.weights
        if weights.tensors().keys() <= found.tensors.keys():
            weights.load(found.tensors, found.body.sent, found.body.sent_experts)
        else:  # they were the view, and will be
            weights.start(self._fold.view_C4096)
        others = {"final", "residual", "kept", *weights.tensors()}
        self._learner.inner.load({name: t for name, t in found.tensors.items() if name not in others})

    def _check_saved(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise CorruptFault for what no worker of this run saved: bytes may be whole and still be wrong."""
        residual = tensors.get("residual")
        shape = self._sending.residual_C4096.shape
        if "final" not in tensors or residual is None or residual.shape != shape:
            raise CorruptFault("the saved state is of another model")
        if not all_finite(residual):  # encoding must be able to rely on it
            raise CorruptFault("the saved error feedback holds NaN or infinity")
        if self._learner.weights.tensors().keys() & tensors.keys():
            check_saved(tensors, self._spec)

    def _check_begun(self) -> None:
        if self._fold.final_round == NOTHING_YET:
            raise LocalFault("this node does not have the start weights of the run yet")


def _first_state(spec: RunSpec) -> tuple[Tensor, int]:
    """Θ₀ and its round; zeros that nobody may use where it is given by a file, which comes as a snapshot."""
    arena = arena_of(spec.model)
    if spec.start:
        return torch.zeros((arena.chunks, CHUNK), dtype=torch.int32), NOTHING_YET
    theta = {name: torch.from_numpy(value) for name, value in genesis(spec.model, spec.seed).items()}
    return bridge.gather(theta, arena), -1
