"""What this node sends: its error feedback, the payloads made of it, and which of them are still pending."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from atoll.node.checkpoint.disk import TEMPORARY, map_file, write_file
from atoll.node.checkpoint.local import LocalBody, PastPayload
from atoll.node.learning.compress.codecs import Codec, Encoder
from atoll.node.learning.compress.feedback.choice import feedback_rule_of
from atoll.node.learning.compress.feedback.memory import Memory, load_rows
from atoll.node.learning.kernels.compiled import untouched_zeros
from atoll.node.learning.outer.fixed import padding_of
from atoll.node.runs.capacity.open_rounds import PAST_PAYLOADS, past_payloads_of
from atoll.node.worker.encoding.slab_encoder import SlabEncoder
from atoll.node.worker.local_weights import SLAB_CHUNKS, LocalWeights
from atoll.node.worker.sizes.codec import SizedCodec, codec_of_round
from atoll.p2p.system.atomic_files import disk
from atoll.protocols.blobs import manifest_of_bytes
from atoll.protocols.ids import Digest
from atoll.protocols.ledger.coverage import Cover, cover_of, rest_of, size_of, slabs
from atoll.protocols.local.worker_messages import Pending, ReleasedMoments
from atoll.protocols.run.arena import CHUNK, Span, arena_of
from atoll.protocols.run.payload import Layout
from atoll.protocols.run.run_spec import RunSpec
from atoll.protocols.run.sections.zeroth_order import is_scalar
from atoll.protocols.run.sized_payload import SizedLayout

_PAYLOAD = ".payload"
LOST_FEEDBACK = "this state is older than what was sent: its error feedback is dropped"
"""Line of the worker's log; see `ErrorFeedback.recognise`."""
NO_SHARE = 2.0**-32
"""What is less of a payload than this is lost in the rounding of e: after a change of chain dozens are so old."""


def share_of_left(feedback: float) -> float:
    """Share of work of a chain that was left which returns where the other chain lacks it.

    With it what returns is the mean of that work, weighted by β^age, instead of its sum: both sides learned much
    of the same, so the sum goes too far. Measured by `atoll bench heal` (docs/epochs.md).
    """
    return 1.0 / sum(feedback**age for age in range(PAST_PAYLOADS))


class MissedPayload(NamedTuple):
    """A payload of ours that did not get into its round's final set, or not everywhere."""

    sent: Pending
    data: bytes | memoryview
    """Mapped if it is a file: more than a hundred may return at once."""
    rows: Cover
    """Rows of the payload that did not count."""


class ErrorFeedback:
    """The error feedback e, float32 `[C, 4096]`, where the encoder has it, and the payloads that left it."""

    def __init__(self, spec: RunSpec, spool: Path, encoder: Encoder) -> None:
        """`encode` takes weights whose anchor is on the encoder's device."""
        self._spec = spec
        self._spool = spool
        self.encoder = encoder
        self._rule = feedback_rule_of(spec, encoder.device) if spec.compress.feedback_rule else None
        arena = arena_of(spec.model)
        self._slab_encoder = SlabEncoder(encoder, arena, padding_of(arena), spec.compress.feedback, self._rule)
        self._keeps = not is_scalar(spec)
        """Whether what was not sent, or missed its final set, is kept. Scalars say all, and are lost then."""
        self.residual_C4096 = untouched_zeros(arena.chunks if self._keeps else 0, encoder.device)
        self.chosen_T: tuple[int, ...] = ()
        """k of each tensor in the next payload of a run with `compress.sizes`; empty: `compress.k`."""
        self.pending: tuple[Pending, ...] = ()
        self.past: tuple[PastPayload, ...] = ()
        """The newest payloads of final rounds."""
        self.left: frozenset[Digest] = frozenset()
        """Payloads of which rows were final in a chain that this node left."""
        self._most_past = past_payloads_of(spec)
        self._released: tuple[ReleasedMoments, ...] = ()
        self.newest: int = -1
        """Newest round that this state knows to be final, sent, or recognised: see `recognise`."""
        with disk(spool):
            spool.mkdir(parents=True, exist_ok=True)

    def encode(self, number: int, weights: LocalWeights) -> bytearray:
        """Payload of β·e + (A − L) on what of the round is trained here, which is in flight from now on.

        What the payload could not hold stays in e; other rows of e are not touched. A rule of the error feedback
        sends and keeps other sums. Raises Divergence for weights that are NaN or from 2⁶⁴ on; nothing has changed.
        """
        cover = cover_of(self._spec, number, weights.experts)
        codec = self._codec_of(number)
        layout: Layout | SizedLayout
        if isinstance(codec, SizedCodec):
            layout = msgspec.structs.replace(codec.sizes, chosen_T=self.chosen_T)
        else:
            layout = codec.layout(size_of(cover))
        payload = self._slab_encoder.encode(number, weights, cover, layout, self.residual_C4096)
        weights.sent = number
        weights.sent_experts = weights.experts
        return payload

    def layout(self, number: int, experts: bytes) -> Layout:
        """Layout of a payload of this round that covers these experts; empty: all. Of one k for all tensors."""
        compress, cover = self._spec.compress, cover_of(self._spec, number, experts)
        return Layout(compress.codec, size_of(cover), compress.k_of(number))

    def _codec_of(self, number: int) -> Codec | SizedCodec:
        return codec_of_round(self._spec, number)

    def path_of(self, blob: Digest) -> Path:
        """Path of a payload of ours until its round is final."""
        return self._spool / f"{blob.hex()}{_PAYLOAD}"

    def add(self, pending: Pending) -> None:
        """Make a payload pending; its file is there before a saved state names it."""
        self.pending = (*self.pending, pending)
        self.newest = max(self.newest, pending.round)

    def write_released(self, number: int, moments: Mapping[int, bytes]) -> tuple[ReleasedMoments, ...]:
        """Write the moments of experts given up; the files stay until the next call. Raises DiskFault."""
        self._released = tuple(ReleasedMoments(e, str(self._spool / f"{number}-{e}.moments")) for e in moments)
        for one in self._released:
            write_file(Path(one.path), [moments[one.expert]])
        return self._released

    def missed(
        self, number: int, counted: Mapping[Digest, Cover], unsafe: Mapping[Digest, bytearray]
    ) -> list[MissedPayload]:
        """Payloads of ours up to round `number` that are not, or not whole, in the final sets. Raises DiskFault.

        `counted`: rows of our payloads that are in them. `unsafe`: payloads that may not be files yet. A payload
        that the disk damaged is left out: its values are not known any more. Empty in a zeroth-order run.
        """
        if not self._keeps:
            return []
        missed = [
            (pending, rest_of(tuple(sorted(counted.get(pending.payload, ()))), size_of(self._cover(pending))))
            for pending in self.pending
            if pending.round <= number
        ]
        with disk(self._spool):
            found = [(p, lost, self._bytes_of(p, unsafe)) for p, lost in missed if lost]
        return [MissedPayload(p, data, lost) for p, lost, data in found if data is not None]

    @staticmethod
    def _bytes_of(pending: Pending, unsafe: Mapping[Digest, bytearray]) -> bytes | memoryview | None:
        if pending.payload in unsafe:
            return bytes(unsafe[pending.payload])
        return map_file(Path(pending.path)) if _is_whole(pending) else None

    def close_rounds(self, number: int, missed: list[MissedPayload]) -> None:
        """Rounds up to `number` are final: what missed its final set returns to the error feedback."""
        for one in missed:
            self._add_back(one)
        # What is damaged counts as sent: its values are not in e, and never will be.
        back = {one.sent.payload: one.rows for one in missed}
        ended = tuple(
            PastPayload(one, rest_of(back.get(one.payload, ()), size_of(self._cover(one))))
            for one in self.pending
            if one.round <= number
        )
        self.past = (*self.past, *ended)[-self._most_past :]
        self.pending = tuple(p for p in self.pending if p.round > number)
        self.left &= {one.payload for one in (*self.pending, *(one.sent for one in self.past))}

    def reopen(self, first: int) -> None:
        """Rounds from `first` on are not final after all: our payloads of them are pending. Raises DiskFault.

        What of them went back to the error feedback leaves it again. One that is not whole any more is left out.
        """
        again = [one for one in self.past if one.sent.round >= first and _is_whole(one.sent)]
        rows = [rest_of(one.rows, size_of(self._cover(one.sent))) for one in again]
        with disk(self._spool):
            back = [
                MissedPayload(one.sent, map_file(Path(one.sent.path)), lost)
                for one, lost in zip(again, rows, strict=True)
                if lost
            ]
        for missed in back:
            self._add_back(missed, sign=-1)
        self.past = tuple(one for one in self.past if one not in again)
        self.pending = (*(one.sent for one in again), *self.pending)
        # Only after the above, which takes out what had gone back whole. What no set held was learned by nobody.
        self.left |= {one.sent.payload for one in again if one.rows}

    def _all_sent(self, sent: Pending) -> PastPayload:
        """Nothing of this payload is in e, wherever it is."""
        return PastPayload(sent, (Span(0, size_of(self._cover(sent))),))

    def _cover(self, pending: Pending) -> Cover:
        return cover_of(self._spec, pending.round, pending.experts)

    def _add_back(self, missed: MissedPayload, sign: int = 1) -> None:
        """Add what e would hold of these rows if never sent, or a share of it; −1: take it out again."""
        cover = self._cover(missed.sent)
        size, shares_C = size_of(cover), self._shares_since(missed.sent)
        back = self._rule.returned(missed.sent.round, len(shares_C)) if self._rule else None
        if back is not None:
            shares_C = back.to_error
        if missed.sent.payload in self.left:
            shares_C *= share_of_left(self._spec.compress.feedback)
        if back is None and shares_C.max() < NO_SHARE:
            return
        values_N4096 = torch.zeros((size, CHUNK))
        self._codec_of(missed.sent.round).give_back(values_N4096, missed.data)
        for counted in rest_of(missed.rows, size):
            values_N4096[counted.start : counted.stop] = 0
        for at, span in slabs(cover, SLAB_CHUNKS):
            rows, part_N4096 = slice(span.start, span.stop), values_N4096[at : at + span.stop - span.start]
            shared = [(self.residual_C4096[rows], sign * shares_C[rows, None])]
            if back is not None and self.memory is not None:
                shared.append((self.memory.values_C4096[rows], -sign * back.from_memory[rows, None]))
            for kept, share_N1 in shared:
                kept += (part_N4096 * share_N1).to(kept.device)

    def _shares_since(self, sent: Pending) -> Tensor:
        """Share of a value of this payload that β has left since, by chunk, float32."""
        ages_C = torch.zeros(len(self.residual_C4096))
        for newer in (*(one.sent for one in self.past), *self.pending):
            for span in self._cover(newer) if newer.round > sent.round else ():
                ages_C[span.start : span.stop] += 1
        return torch.tensor(self._spec.compress.feedback).pow(ages_C)

    @property
    def memory(self) -> Memory | None:
        """What the run's rule keeps beside e."""
        return self._rule.memory if self._rule else None

    def load(self, residual_C4096: Tensor, body: LocalBody, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Load what was saved; `tensors` has what the memory gave.

        A payload that is not whole any more is not pending.
        """
        self._drop_residual()
        load_rows(self.residual_C4096, residual_C4096)
        if self.memory is not None:
            self.memory.load(tensors or {})
        saved = [self._here(one) for one in body.pending]
        self.pending = tuple(filter(_is_whole, saved))
        gone = (self._all_sent(one) for one in saved if one not in self.pending)
        past = (msgspec.structs.replace(one, sent=self._here(one.sent)) for one in body.past)
        self.past = tuple(sorted((*past, *gone), key=lambda one: one.sent.round))
        self.newest = max(body.final, body.newest, *(one.round for one in body.pending), -1)
        self.left = frozenset(body.left)

    def _here(self, sent: Pending) -> Pending:
        """A saved payload at its place in this spool: the home may have been moved, or copied, since then."""
        return msgspec.structs.replace(sent, path=str(self.path_of(sent.payload)))

    def recognise(self, number: int) -> bool:
        """Round `number` has a contribution of ours. False: a newer state than this made it, before a restore.

        That is so where the round is newer than all that this state trained, recognised, or had as final. That
        contribution may have sent what the error feedback holds here, so the error feedback becomes zero. One to
        an older round changes nothing: the error feedback is then the rest of this state's own work.
        """
        if number <= self.newest:
            return True
        self.newest = number
        self._drop_residual()
        self.past = tuple(self._all_sent(one.sent) for one in self.past)
        return False

    def _drop_residual(self) -> None:
        self.residual_C4096 = untouched_zeros(len(self.residual_C4096), self.residual_C4096.device)
        if self.memory is not None:
            self.memory.drop()

    def sweep(self, pending: tuple[Pending, ...], past: tuple[PastPayload, ...]) -> None:
        """Delete spooled files but payloads of these; the blob store has its own names. Raises DiskFault.

        Unfinished ones too, so it may not run while a payload is written.
        """
        paths = (*(p.path for p in pending), *(p.sent.path for p in past), *(p.path for p in self._released))
        keep = {os.path.basename(path) for path in paths}
        with disk(self._spool), os.scandir(self._spool) as found:
            for name in [file.name for file in found]:  # no Path of each: it would intern 64 names a round
                ended = name.endswith((_PAYLOAD, ".moments")) and name not in keep
                if ended or name.endswith(_PAYLOAD + TEMPORARY):
                    (self._spool / name).unlink(missing_ok=True)


def _is_whole(pending: Pending) -> bool:
    """Whether the payload still lies in the spool. An older generation may name one that was swept."""
    path = Path(pending.path)
    with disk(path):
        return path.exists() and manifest_of_bytes(map_file(path)).id == pending.payload
