"""What this node sends: its error feedback, the payloads it made of it, and which of them are not settled yet."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.node.checkpoint.disk import TEMPORARY, disk, map_file, write_file
from atoll.node.learning.compress.codecs import codec_of
from atoll.node.learning.compress.encoder import Encoder
from atoll.node.learning.outer.padding import clear, padding_of
from atoll.node.worker.local_weights import SLAB_CHUNKS, LocalWeights
from atoll.protocols.blobs import manifest_of_bytes
from atoll.protocols.errors import TRAIN_AGAIN, Divergence
from atoll.protocols.ids import Digest
from atoll.protocols.ledger.coverage import Cover, cover_of, rest_of, size_of, slabs
from atoll.protocols.local.worker_messages import Pending, ReleasedMoments
from atoll.protocols.run.arena import CHUNK, Span, arena_of
from atoll.protocols.run.payload import Layout
from atoll.protocols.run.run_spec import RunSpec

_PAYLOAD = ".payload"
Work = Callable[[int, Span, Tensor], object]
"""What is done with a slab: its first row in the payload, its chunks, its local weights."""


class Missed(NamedTuple):
    """A payload of ours that did not get into its round's final set, or not everywhere."""

    cover: Cover
    payload: bytes
    rows: Cover
    """Those of the payload that did not."""


class ErrorFeedback:
    """The error feedback e, float32 `[C, 4096]`, where the encoder has it, and the payloads that left it."""

    def __init__(self, spec: RunSpec, spool: Path, encoder: Encoder) -> None:
        """`encode` takes weights whose anchor is on the encoder's device."""
        self._spec, self._spool, self._encoder = spec, spool, encoder
        self._codec = codec_of(spec.compress.codec, spec.compress.k)
        arena = arena_of(spec.model)
        self._padding = padding_of(arena)
        self.residual_C4096 = torch.zeros((arena.chunks, CHUNK), device=encoder.device)
        self.pending: tuple[Pending, ...] = ()
        self._parted: tuple[ReleasedMoments, ...] = ()
        self._newest: int = -1
        """Newest round that this state knows to be settled, sent, or recognised: see `recognise`."""
        with disk(spool):
            spool.mkdir(parents=True, exist_ok=True)

    def encode(self, number: int, weights: LocalWeights) -> bytearray:
        """Payload of β·e + (A − L) on what of the round is trained here, which is in flight from now on.

        What it could not say stays in e; other rows of e are not touched. Raises Divergence for weights that are
        NaN or from 2⁶⁴ on, with everything as it was.
        """
        cover = cover_of(self._spec, number, weights.experts)
        if not all(self._each_slab(weights, cover, lambda _, span, local: self._encoder.is_sound(local))):
            raise Divergence("the local weights hold NaN or infinity", hint=TRAIN_AGAIN)
        payload = self._encoder.begin(self.layout(number, weights.experts))

        def say(at: int, span: Span, local: Tensor) -> None:
            rows = slice(span.start, span.stop)
            before = self.residual_C4096[rows], weights.anchor_C4096[rows], local
            payload.fill(at, *before, self._spec.compress.feedback)
            clear(self.residual_C4096[rows], self._padding, span.start)
            weights.mark_sent(span, local)

        self._each_slab(weights, cover, say)
        weights.sent, weights.sent_experts = number, weights.experts
        return payload.whole()

    def layout(self, number: int, experts: bytes) -> Layout:
        """Of a payload of this round that covers these experts; empty: all."""
        return self._codec.layout(size_of(cover_of(self._spec, number, experts)))

    def path_of(self, blob: Digest) -> Path:
        """Where a payload of ours lies until its round is settled."""
        return self._spool / f"{blob.hex()}{_PAYLOAD}"

    def add(self, pending: Pending) -> None:
        """A payload is out: from now on it is pending, and its file is there before a saved state says so."""
        self.pending = (*self.pending, pending)
        self._newest = max(self._newest, pending.round)

    def part(self, number: int, moments: Mapping[int, bytes]) -> tuple[ReleasedMoments, ...]:
        """Write the moments of experts given up in a round; they lie until the next call. Raises DiskFault."""
        self._parted = tuple(ReleasedMoments(e, str(self._spool / f"{number}-{e}.moments")) for e in moments)
        for one in self._parted:
            write_file(Path(one.path), [moments[one.expert]])
        return self._parted

    def missed(
        self, number: int, counted: Mapping[Digest, Cover], unsafe: Mapping[Digest, bytearray]
    ) -> list[Missed]:
        """What of ours up to round `number` is not in the final sets. Raises DiskFault.

        `counted`: rows of our payloads that are. `unsafe`: payloads that may not be files yet. What the disk
        damaged is left out: its values are not known any more.
        """
        missed = [
            (pending, rest_of(tuple(sorted(counted.get(pending.payload, ()))), size_of(self._cover(pending))))
            for pending in self.pending
            if pending.round <= number
        ]
        with disk(self._spool):
            found = [(p, lost, self._bytes_of(p, unsafe)) for p, lost in missed if lost]
        return [Missed(self._cover(p), data, lost) for p, lost, data in found if data is not None]

    @staticmethod
    def _bytes_of(pending: Pending, unsafe: Mapping[Digest, bytearray]) -> bytes | None:
        if pending.payload in unsafe:
            return bytes(unsafe[pending.payload])
        return Path(pending.path).read_bytes() if _is_whole(pending) else None

    def settle(self, number: int, missed: list[Missed]) -> None:
        """Payloads up to `number` are decided: what missed its final set returns to the error feedback."""
        for one in missed:
            self._give_back(one)
        self.pending = tuple(p for p in self.pending if p.round > number)

    def _cover(self, pending: Pending) -> Cover:
        return cover_of(self._spec, pending.round, pending.experts)

    def _give_back(self, missed: Missed) -> None:
        size = size_of(missed.cover)
        said_N4096 = torch.zeros((size, CHUNK))
        self._codec.give_back(said_N4096, missed.payload)
        for counted in rest_of(missed.rows, size):
            said_N4096[counted.start : counted.stop] = 0
        for at, span in slabs(missed.cover, SLAB_CHUNKS):
            rows = self.residual_C4096[span.start : span.stop]
            rows += said_N4096[at : at + span.stop - span.start].to(rows.device)

    def load(self, residual_C4096: Tensor, pending: tuple[Pending, ...], final: int) -> None:
        """Take over what was saved when round `final` was. A payload that is not whole any more is not pending."""
        self.residual_C4096.copy_(residual_C4096)
        self.pending = tuple(filter(_is_whole, pending))
        self._newest = max(final, *(one.round for one in pending), -1)

    def recognise(self, number: int) -> bool:
        """Round `number` has a contribution of ours. False: a newer state than this made it, before a restore.

        That is so where the round is newer than all that this state trained, recognised, or had as final. What is
        unsaid here may have been said in it: then nothing is unsaid any more. One to an older round changes
        nothing: what is unsaid is by then the rest of this state's own work, which nobody has said.
        """
        if number <= self._newest:
            return True
        self._newest = number
        self.residual_C4096.zero_()
        return False

    def sweep(self, pending: tuple[Pending, ...]) -> None:
        """Delete spooled files but payloads of these; the blob store has its own names. Raises DiskFault.

        Unfinished ones too: whoever writes payloads calls this between two of them.
        """
        keep = {Path(path).name for path in (*(p.path for p in pending), *(p.path for p in self._parted))}
        with disk(self._spool):
            for path in self._spool.iterdir():
                ended = path.suffix in (_PAYLOAD, ".moments") and path.name not in keep
                if ended or path.name.endswith(_PAYLOAD + TEMPORARY):
                    path.unlink(missing_ok=True)

    def _each_slab(self, weights: LocalWeights, cover: Cover, work: Work) -> list[object]:
        """What `work` gives for every slab, by all threads together. Each thread has one buffer for its slabs."""
        threads, device = self._encoder.threads, self._encoder.device
        most = max(1, min(self._encoder.slab_chunks, size_of(cover)))

        def share(first: int) -> list[object]:
            into_M4096 = torch.empty((most, CHUNK), device=device)
            mine = islice(slabs(cover, most), first, None, threads)
            return [work(at, span, weights.rows(span, into_M4096)) for at, span in mine]

        if threads == 1:
            return share(0)
        with ThreadPoolExecutor(max_workers=threads) as pool:
            return [found for each in pool.map(share, range(threads)) for found in each]


def _is_whole(pending: Pending) -> bool:
    """Whether the payload still lies in the spool. An older generation may name one that was swept."""
    path = Path(pending.path)
    with disk(path):
        return path.exists() and manifest_of_bytes(map_file(path)).id == pending.payload
