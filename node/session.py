"""The worker's work: one run's model, data, optimiser, error feedback and fold, composed.

Holds 4 bytes per value each for Θ_final, the view, the error feedback and the local weights, and 8 for Adam.
Everything but the view is saved in one generation (`state/`), whole or not at all, after each trained
round. A Finalize that comes while a round is trained is saved with that round: were it lost, the
daemon would ask for it again, and it gives the same bits.

Every ask may be asked again after a DiskFault: what it did in memory is done once, the saving is repeated.
"""

import time
from collections.abc import Generator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.node.checkpoint import local, snapshot
from atoll.node.checkpoint.disk import disk, write_file
from atoll.node.compress.codecs import codec_of
from atoll.node.compress.folding import Step
from atoll.node.data.cache import default_cache
from atoll.node.data.dataset import open_data
from atoll.node.data.windows import Place, windows
from atoll.node.inner.evaluate import VAL_WINDOWS, evaluate
from atoll.node.inner.loop import Inner, run_steps
from atoll.node.model import bridge
from atoll.node.model.decoder import Decoder, loss_of
from atoll.node.model.genesis import genesis
from atoll.node.outer.fixed import state_digest, to_float
from atoll.node.outer.fold import Fold, Part
from atoll.node.outer.padding import clear, padding_of
from atoll.protocols import codec
from atoll.protocols import worker as w
from atoll.protocols.arena import arena_of
from atoll.protocols.blobs import manifest_of_bytes
from atoll.protocols.errors import AtollError, CorruptFault, DecodeError, Superseded
from atoll.protocols.ids import Digest, Round
from atoll.protocols.records import MAX_WEIGHT
from atoll.protocols.run import RunSpec

WEIGHT_UNIT = 64
"""Weight of a member that trained on the round's nominal tokens."""


class Session:
    """One run in one worker."""

    def __init__(self, start: w.Start) -> None:
        """Build everything and load what is on disk. Raises ConfigError, CorruptFault, DiskFault."""
        torch.set_num_threads(max(1, start.threads))
        self._start = start
        self._spec = spec = codec.decode(start.spec, RunSpec)
        self._home = Path(start.home)
        self._arena = arena_of(spec.model)
        self._codec = codec_of(spec.compress.codec, spec.compress.k)
        with disk(self._home):
            (self._home / "spool").mkdir(parents=True, exist_ok=True)
        self._data = open_data(spec.data, spec.model.context, start.data, default_cache())
        self._model = Decoder(spec.model).to(start.device)
        self._inner = Inner(self._model, loss_of, spec.inner)
        self._steps_taken = 0
        theta = {name: torch.from_numpy(value) for name, value in genesis(spec.model, spec.seed).items()}
        self._fold = Fold(bridge.gather(theta, self._arena), self._arena, self._load, self._update)
        self._padding = padding_of(self._arena)
        self._residual_C4096 = torch.zeros((self._arena.chunks, 4096))
        self._pending: tuple[w.Pending, ...] = ()
        self._training: Round | None = None
        self._unsaved: tuple[w.Trained, bytes] | None = None
        """A trained round that the disk has not taken yet, with its payload until that is a file."""
        self._restore()

    def started(self) -> w.Started:
        """What was found on disk."""
        return w.Started(
            self._fold.final_round,
            self._fold.state_digest(),
            self._pending,
            self._spec.model.parameters,
            self._start.device,
        )

    def answer(self, ask: w.Ask) -> w.Answer:
        """Do everything but training. Raises AtollError."""
        match ask:
            case w.Verify(path):
                self._codec.check(*self._load(path), self._arena.chunks)
                return w.Verified()
            case w.Fold(number, members):
                return self._fold_round(number, members)
            case w.Check(number, _) if number <= self._fold.final_round:
                # Its payloads had to be fetched again, and meanwhile the round became final without this node.
                raise Superseded(f"round {number} is final already")
            case w.Check(number, members):
                return w.Checked(number, self._fold.check(number, _parts(members)))
            case w.Finalize(number, members):
                return self._finalize(number, members)
            case w.Adopt():
                return self._adopt(ask)
            case w.Snapshot(path):
                return self._snapshot(Path(path))
            case w.Evaluate():
                return self._evaluate()
        raise AtollError(f"the worker has no answer to {type(ask).__name__}")

    # --- training -------------------------------------------------------------------------------

    def train(self, ask: w.Train) -> Generator[w.Progress | w.Trained, None, None]:
        """The round's inner steps, one at a time, then the encoded and saved result."""
        if self._unsaved is not None:
            trained = self._save_trained()
            if trained.pending.round == ask.round:
                yield trained
                return
        self._training = ask.round
        try:
            yield from self._steps(ask)
        finally:
            self._training = None

    def _steps(self, ask: w.Train) -> Generator[w.Progress | w.Trained, None, None]:
        began = time.monotonic()
        base_C4096 = self._fold.view_C4096
        base = self._fold.view_digest()
        bridge.fill(self._model, to_float(base_C4096), self._arena)
        total, losses = ask.steps, []
        first = self._spec.steps_before(ask.round)
        place = Place(self._spec.seed, first, ask.slot, ask.slots, self._spec.inner.batch)
        for step, loss in enumerate(run_steps(self._inner, lambda at: self._batch(place, at), first, total)):
            losses.append(loss)
            self._steps_taken += 1
            speed = (step + 1) * self._step_tokens / max(1e-9, time.monotonic() - began)
            yield w.Progress(ask.round, step + 1, total, loss, speed)
        train_s = time.monotonic() - began
        done, payload = self._encode(ask.round, base_C4096, base, losses)
        trained = w.Trained(done, len(payload), train_s, time.monotonic() - began - train_s)
        self._unsaved = (trained, payload)
        yield self._save_trained()

    def _batch(self, place: Place, step: int) -> NDArray[np.int64]:
        return self._data.batch(windows(place, step, self._data.num_windows))

    @property
    def _step_tokens(self) -> int:
        return self._spec.inner.batch * self._spec.model.context

    def _encode(
        self, number: Round, base_C4096: Tensor, base: Digest, losses: list[float]
    ) -> tuple[w.Pending, bytes]:
        """Payload of β·e + (θ_base − θ_local); what it could not say stays in e."""
        local_C4096 = bridge.read(self._model, self._arena).cpu()
        payload = self._codec.encode(
            self._residual_C4096,
            base_C4096,
            local_C4096,
            self._spec.compress.feedback,
            threads=max(1, self._start.threads),
        )
        clear(self._residual_C4096, self._padding)
        blob = manifest_of_bytes(payload).id
        path = self._home / "spool" / f"{blob.hex()}.payload"
        tokens = len(losses) * self._step_tokens
        weight = weight_of(tokens, self._spec.steps(number) * self._step_tokens)
        loss = sum(losses) / len(losses)
        return w.Pending(number, base, blob, str(path), len(losses), tokens, weight, loss), payload

    def _save_trained(self) -> w.Trained:
        """Keep the result. After a full disk the same round is asked again, and only saved again."""
        assert self._unsaved is not None
        trained, payload = self._unsaved
        if payload:
            write_file(Path(trained.pending.path), [payload])
            self._pending = (*self._pending, trained.pending)
            self._unsaved = (trained, b"")
        self._save()
        self._unsaved = None
        return trained

    # --- the fold -------------------------------------------------------------------------------

    def _fold_round(self, number: Round, members: tuple[w.Member, ...]) -> w.Folded:
        began = time.monotonic()
        if number > self._fold.final_round:  # a Finalize may have overtaken this request
            self._fold.set_round(number, _parts(members))
        return w.Folded(number, self._fold.view_digest(), time.monotonic() - began)

    def _finalize(self, number: Round, members: tuple[w.Member, ...]) -> w.Finalized:
        if number != self._fold.final_round:  # else: it was done, but could not be saved
            settle = self._settling(number, {m.payload for m in members if m.author == self._start.peer})
            self._fold.finalize(number, _parts(members))
            self._settle(number, settle)
        if self._training is None:
            self._save()
        return w.Finalized(number, self._fold.state_digest())

    def _settling(self, number: int, included: set[Digest]) -> list[bytes]:
        """Payloads of ours up to round `number` that missed their final sets. Raises DiskFault."""
        missed = [Path(p.path) for p in self._pending if p.round <= number and p.payload not in included]
        with disk(self._home):
            return [path.read_bytes() for path in missed if path.exists()]

    def _settle(self, number: int, missed: list[bytes]) -> None:
        """Payloads up to `number` are decided: what missed its final set returns to the error feedback."""
        for payload in missed:
            self._codec.give_back(self._residual_C4096, payload)
        self._pending = tuple(p for p in self._pending if p.round > number)

    def _adopt(self, ask: w.Adopt) -> w.Adopted:
        if ask.round != self._fold.final_round:  # else: it was done, but could not be saved
            found = snapshot.read_snapshot(Path(ask.path), self._arena, state_digest)
            if found.round != ask.round or found.state != ask.state:
                raise DecodeError(
                    f"the snapshot is of round {found.round}, {found.state.hex()[:8]}; asked was another"
                )
            settle = self._settling(ask.round, set(ask.included))
            self._fold.adopt(found.theta_C4096, ask.round)
            self._settle(ask.round, settle)
        self._save()
        return w.Adopted(ask.round, ask.state)

    def _snapshot(self, path: Path) -> w.Snapshotted:
        state = snapshot.Snapshot(self._fold.final_C4096, self._fold.final_round, self._fold.state_digest())
        with disk(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        size = snapshot.write_snapshot(path, state, self._arena)
        return w.Snapshotted(Round(self._fold.final_round), state.state, str(path), size)

    def _evaluate(self) -> w.Evaluated:
        if self._training is not None:
            kept = bridge.read(self._model, self._arena)
        bridge.fill(self._model, to_float(self._fold.view_C4096), self._arena)
        val_WT1 = self._data.validation(VAL_WINDOWS)
        found = evaluate(self._model, loss_of, val_WT1, self._data.bytes_of(val_WT1))
        if self._training is not None:
            bridge.fill(self._model, kept, self._arena)
        return w.Evaluated(self._fold.view_digest(), found.val_bpb, found.val_loss)

    def _load(self, path: str) -> tuple[bytes]:
        with disk(Path(path)):
            try:
                return (Path(path).read_bytes(),)
            except FileNotFoundError as error:
                raise CorruptFault(f"{path} is gone", hint="it is fetched again from its holders") from error

    def _update(self, members: Sequence[tuple[int, bytes]]) -> Tensor:
        outer = Step(self._spec.outer.alpha_256, self._spec.outer.floor_256)
        threads = max(1, self._start.threads)
        return self._codec.update_of(members, self._arena.chunks, outer, threads=threads)

    # --- the disk -------------------------------------------------------------------------------

    def _save(self) -> None:
        body = local.LocalBody(
            self._spec.id,
            self._fold.final_round,
            self._fold.state_digest(),
            self._steps_taken,
            self._pending,
        )
        tensors = {"final": self._fold.final_C4096, "residual": self._residual_C4096, **self._inner.state()}
        local.save_local(self._home / "state", body, tensors)
        self._sweep()

    def _restore(self) -> None:
        found = local.load_local(self._home / "state", self._spec.id)
        if found is None:
            return
        for line in found.report:
            print(line, flush=True)  # noqa: T201 - stdout is the worker's log
        if found.body.final >= 0:
            self._fold.adopt(found.tensors["final"], found.body.final)
        self._residual_C4096 = found.tensors["residual"].clone()
        self._steps_taken = found.body.steps
        self._inner.load({name: t for name, t in found.tensors.items() if name not in ("final", "residual")})
        self._pending = tuple(filter(_is_whole, found.body.pending))

    def _sweep(self) -> None:
        """Delete spooled payloads that nobody waits for; the blob store has its own copies."""
        keep = {Path(pending.path).name for pending in self._pending}
        with disk(self._home):
            for path in (self._home / "spool").glob("*.payload"):
                if path.name not in keep:
                    path.unlink(missing_ok=True)


def weight_of(tokens: int, nominal_tokens: int) -> int:
    """1 … 255: the share of the round's nominal tokens, in 64ths, rounded to the nearest."""
    return max(1, min(MAX_WEIGHT, (2 * tokens * WEIGHT_UNIT + nominal_tokens) // (2 * nominal_tokens)))


def _is_whole(pending: w.Pending) -> bool:
    """Whether the payload still lies in the spool. An older generation may name one that was swept."""
    path = Path(pending.path)
    with disk(path):
        return path.exists() and manifest_of_bytes(path.read_bytes()).id == pending.payload


def _parts(members: tuple[w.Member, ...]) -> list[Part]:
    return [Part(member.entry, member.weight, member.path) for member in members]
