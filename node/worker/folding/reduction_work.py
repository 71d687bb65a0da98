"""The worker's part in reduced rounds: slices are applied, our own is reduced and opened, others' are judged.

See docs/wires/reduction.md. The end of our chain of Reductions is saved with the worker's generation. One that was
made in an earlier life can be continued; to be opened it is made again, from its rows and this end.
"""

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from atoll.node.checkpoint.disk import write_file
from atoll.node.checkpoint.local import KeptBody
from atoll.node.learning.compress.encoding import encode_residual
from atoll.node.learning.compress.folding import Tables
from atoll.node.learning.compress.folding import decode as decode_tables
from atoll.node.learning.outer.mean import outer_update, weighted_mean
from atoll.node.learning.reduction.judging import proves_fault
from atoll.node.learning.reduction.reducer import ChainEnd, Claimed, Reducer
from atoll.node.learning.reduction.reducing import Arithmetic, ReducerErrorFeedback, hand_back, slice_update
from atoll.p2p.system.atomic_files import disk
from atoll.protocols import codec
from atoll.protocols.blobs import manifest_of_bytes
from atoll.protocols.errors import AtollError, DecodeError
from atoll.protocols.ids import Digest
from atoll.protocols.ledger.records import decode_entry
from atoll.protocols.ledger.reduction import (
    Offer,
    ReductionRules,
    RowsAnswer,
    decode_proof,
    rows_max_bytes,
    rules_of,
)
from atoll.protocols.ledger.rows import RowPart, check_root, checked_rows
from atoll.protocols.local import worker_messages
from atoll.protocols.run.arena import CHUNK, Span
from atoll.protocols.run.payload import Layout
from atoll.protocols.run.run_spec import RunSpec

Load = Callable[[str], memoryview]
"""A file, mapped: it may be larger than what is legal. Raises CorruptFault where it is gone."""
_SUFFIX = ".reduced"
KEPT = ("kept", "kept_before")
"""Names in a checkpoint: the end of our chain, and what its last Reduction began with, if our slice had moved."""
OPENABLE = 16
"""Rounds for which a Reduction that missed its final set can be opened: who heard nothing of it asks again."""


def encode(values_C4096: Tensor, k: int) -> bytes:
    """Payload of `sparse2` of finite float32 values. The values are used up."""
    nowhere, layout = torch.zeros_like(values_C4096), Layout("sparse2", len(values_C4096), k)
    return encode_residual(values_C4096, nowhere, nowhere, 1.0, layout)


def decode(payload: bytes | memoryview, chunks: int, k: int) -> Tables:
    """Tables of a payload of `sparse2`. Raises DecodeError."""
    return decode_tables(payload, Layout("sparse2", chunks, k))


ARITHMETIC = Arithmetic(encode, decode, weighted_mean, outer_update)
"""The arithmetic of reductions, put together from the compiled codec and the mean."""


class SliceWork:
    """One node's slices. Reductions have the names of their rounds."""

    def __init__(self, rules: ReductionRules, alpha_256: int, load: Load, spool: Path) -> None:
        """`spool`: folder of our Reductions' payloads; what an earlier life left in it is deleted."""
        self._rules = rules
        self._alpha_256 = alpha_256
        self._load = load
        self._spool = spool
        self._reducer = Reducer(rules, ARITHMETIC)
        self._made: dict[int, worker_messages.ReduceReply] = {}
        self._newest: KeptBody | None = None
        """The last Reduction, until its round is final."""
        self._again: dict[int, Digest] = {}
        """Payloads of what can be opened though an earlier life made it, or its round is final; by round."""
        self._lost: set[int] = set()
        """Rounds of Reductions of an earlier life that could not be made again."""
        with disk(spool):
            for path in spool.glob(f"*{_SUFFIX}"):  # of an earlier life: the blob store has its own name for it
                path.unlink(missing_ok=True)

    def update(self, slices: Sequence[worker_messages.Slice], chunks: int) -> Tensor:
        """U int32 `[chunks, 4096]` of what counts in each slice. Raises DecodeError, CorruptFault."""
        update = torch.zeros((chunks, CHUNK), dtype=torch.int32)
        for part in slices:
            span = part.span
            raw = [(member.weight, self._rows(member.path, span).rows) for member in part.raw]
            reduced = [(member.weight, self._load(member.path)) for member in part.reduced]
            rows = slice_update(span.chunks, raw, reduced, self._rules, self._alpha_256, ARITHMETIC)
            update[span.start : span.stop] = rows
        return update

    def check(self, payload: memoryview, root: bytes, span: Span) -> None:
        """Raise DecodeError unless these bytes are the legal payload of a Reduction with this root of its rows."""
        decode(payload, span.chunks, self._rules.reduced_k)
        check_root(payload, Layout("sparse2", span.chunks, self._rules.reduced_k), root)

    def reduce(self, ask: worker_messages.ReduceRequest, residual_C4096: Tensor) -> worker_messages.ReduceReply:
        """Our Reduction of a round; what its error feedback no longer holds goes into our own.

        Asked again in the same life, it returns the same Reduction. Raises DecodeError for rows of another root.
        """
        known = self._made.get(ask.round)
        if known is not None and Path(known.path).exists():
            return known
        last = self._reducer.last
        if last is not None and last.name != _name(ask.previous):
            self._reducer.drop()
        made, rest = self._reducer.reduce(ask.span, self._parts(ask))
        blob = manifest_of_bytes(made.payload).id
        path = self._spool / f"{blob.hex()}{_SUFFIX}"
        write_file(path, [memoryview(made.payload)])
        if rest is not None:
            hand_back(residual_C4096, rest)
        self._reducer.published(_name(ask.round), made)
        previous = ask.previous if made.previous else -1
        done = worker_messages.ReduceReply(
            round=ask.round,
            payload=blob,
            path=str(path),
            rows=made.tree.root,
            kept=made.kept_root,
            previous=previous,
        )
        self._made[ask.round] = done
        self._newest = KeptBody(ask.round, blob, ask.span)
        return done

    def open(self, ask: worker_messages.OpenRequest) -> worker_messages.OpenReply:
        """Everything about one chunk of one of our Reductions. Raises LocalFault for one that is not here."""
        for one in ask.again:
            # The newest comes first: what it began with is what the one before it left.
            with contextlib.suppress(AtollError):
                self._make_again(one)
        return worker_messages.OpenReply(codec.encode(self._reducer.open(_name(ask.round), ask.chunk)))

    def _make_again(self, one: worker_messages.Published) -> None:
        number, payload, previous = one.ask.round, bytes(self._load(one.path)), one.ask.previous
        if number in self._made or number in self._again or number in self._lost:
            return
        self._lost.add(number)  # until it is made: peers may ask often, and each try takes as long as reducing
        claim = Claimed(one.ask.span, _name(previous) if previous >= 0 else b"", one.began, one.kept)
        self._reducer.make_again(_name(number), self._parts(one.ask), payload, claim=claim)
        self._again[number] = manifest_of_bytes(payload).id
        self._lost.discard(number)

    def judge(self, ask: worker_messages.JudgeRequest) -> worker_messages.JudgeReply:
        """Whether a proof shows a wrong Reduction. Raises DecodeError or SignatureFault if it does not fit."""
        proof = decode_proof(self._load(ask.path), self._rules)
        if decode_entry(proof.reduction, self._rules.run).id != ask.reduction:
            raise DecodeError("the proof is about another Reduction")
        return worker_messages.JudgeReply(proves_fault(proof, self._rules, ARITHMETIC))

    def close_rounds(self, number: int, counted: Collection[Digest], residual_C4096: Tensor) -> None:
        """Rounds up to `number` are final: where our Reduction missed its set, the chain begins anew."""
        newest = self._newest
        if newest is not None and newest.round <= number:
            if newest.round not in self._made and newest.payload not in counted:
                self._reducer.drop()  # of an earlier life: what it added is not known, so nothing is owed
            self._newest = None
        for at in sorted(at for at in self._made if at <= number):
            done = self._made.pop(at)
            if done.payload not in counted:
                hand_back(residual_C4096, self._reducer.start_anew(_name(at)))
            self._again[at] = done.payload
            with disk(Path(done.path)):
                Path(done.path).unlink(missing_ok=True)
        self._forget(number, counted)

    def _forget(self, number: int, counted: Collection[Digest]) -> None:
        """Forget what opens the Reductions of final rounds, but of the oldest that lately missed its set."""
        # The oldest: by it others judge whether those that came after count.
        final = [at for at in sorted(self._again) if at <= number]
        missed = [at for at in final if self._again[at] not in counted and number - at < OPENABLE]
        for at in final:
            if at not in missed[:1]:
                del self._again[at]
                self._reducer.forget(_name(at))

    def tensors(self) -> dict[str, Tensor]:
        """For a checkpoint: the error feedback at the end of the chain; no copy."""
        return {name: end.left.values_C4096 for name, end in zip(KEPT, self._ends(), strict=False)}

    def words(self) -> tuple[KeptBody, ...]:
        """What a checkpoint's body says about `tensors`."""
        payload = self._newest.payload if self._newest is not None else Digest(bytes(32))
        numbers = [(int.from_bytes(end.name, "big", signed=True), end.left.span) for end in self._ends()]
        return tuple(KeptBody(number, payload, span) for number, span in numbers)

    def load(self, words: Sequence[KeptBody], found: Mapping[str, Tensor], final: int) -> None:
        """Go on from a checkpoint of that final round. What does not fit is dropped: zeros may begin a chain."""
        saved = [(body, found[name]) for body, name in zip(words, KEPT, strict=False) if name in found]
        if not saved or any(values.shape != (body.span.chunks, CHUNK) for body, values in saved):
            return
        ends = [(_name(body.round), ReducerErrorFeedback(body.span, values.clone())) for body, values in saved]
        self._reducer.restore(*ends)
        self._newest = saved[0][0] if saved[0][0].round > final else None

    def _ends(self) -> tuple[ChainEnd, ...]:
        last, before = self._reducer.last, self._reducer.before_last
        return () if last is None else (last,) if before is None else (last, before)

    def _rows(self, path: str, span: Span) -> RowsAnswer:
        cap = rows_max_bytes(span, self._rules.chunks, self._rules.k)
        return codec.decode(self._load(path), RowsAnswer, max_bytes=cap)

    def _parts(self, ask: worker_messages.ReduceRequest) -> Mapping[Offer, RowPart]:
        return {
            Offer(member.entry, member.author, member.weight, 0): self._part(root, member.path, ask.span)
            for member, root in zip(ask.raw, ask.roots, strict=True)
        }

    def _part(self, root: Digest, path: str, span: Span) -> RowPart:
        found = self._rows(path, span)
        return checked_rows(root, self._rules.chunks, self._rules.k, span, found.rows, found.path)


def slice_work_of(spec: RunSpec, load: Load, spool: Path) -> SliceWork | None:
    """The slices of a run; None where it reduces no rounds."""
    return None if spec.reduce is None else SliceWork(rules_of(spec), spec.outer.alpha_256, load, spool)


def _name(number: int) -> bytes:
    return number.to_bytes(8, "big", signed=True)
