"""What this node sends: its error feedback, the payloads it made of it, and which of them are not settled yet."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from atoll.node.checkpoint.disk import disk, map_file
from atoll.node.compress import encoding
from atoll.node.compress.codecs import codec_of
from atoll.node.local_weights import SLAB_CHUNKS, LocalWeights
from atoll.node.outer.padding import clear, padding_of
from atoll.protocols import worker as w
from atoll.protocols.arena import CHUNK, arena_of
from atoll.protocols.blobs import manifest_of_bytes
from atoll.protocols.coverage import Cover, Span, cover_of, size_of, slabs
from atoll.protocols.errors import TRAIN_AGAIN, Divergence
from atoll.protocols.ids import Digest
from atoll.protocols.run import RunSpec

Work = Callable[[int, Span, Tensor], object]
"""What is done with a slab: its first row in the payload, its chunks, its local weights."""


class Sending:
    """The error feedback e, float32 `[C, 4096]`, and the folder of payloads that left it."""

    def __init__(self, spec: RunSpec, spool: Path, threads: int) -> None:
        self._spec, self._spool, self._threads = spec, spool, threads
        self._codec = codec_of(spec.compress.codec, spec.compress.k)
        arena = arena_of(spec.model)
        self._padding = padding_of(arena)
        self.residual_C4096 = torch.zeros((arena.chunks, CHUNK))
        self.pending: tuple[w.Pending, ...] = ()
        with disk(spool):
            spool.mkdir(parents=True, exist_ok=True)

    def encode(self, number: int, weights: LocalWeights) -> bytearray:
        """Payload of β·e + (A − L) on what of the round is trained here, which is in flight from now on.

        What it could not say stays in e; other rows of e are not touched. Raises Divergence for weights that are
        NaN or from 2⁶⁴ on, with everything as it was.
        """
        cover = cover_of(self._spec, number, weights.experts)
        if not all(self._each_slab(weights, cover, lambda _, span, local: encoding.is_sound(local))):
            raise Divergence("the local weights hold NaN or infinity", hint=TRAIN_AGAIN)
        layout = self._codec.layout(size_of(cover))
        payload = encoding.blank_payload(layout)

        def say(at: int, span: Span, local: Tensor) -> None:
            rows = slice(span.start, span.stop)
            before = self.residual_C4096[rows], weights.anchor_C4096[rows], local
            encoding.encode_rows(payload, layout, at, *before, self._spec.compress.feedback)
            clear(self.residual_C4096[rows], self._padding, span.start)
            weights.mark_sent(span, local)

        self._each_slab(weights, cover, say)
        weights.sent, weights.sent_experts = number, weights.experts
        return payload

    def path_of(self, blob: Digest) -> Path:
        """Where a payload of ours lies until its round is settled."""
        return self._spool / f"{blob.hex()}.payload"

    def add(self, pending: w.Pending) -> None:
        """A payload is out: from now on it is pending, and its file is there before a saved state says so."""
        self.pending = (*self.pending, pending)

    def missed(
        self, number: int, included: set[Digest], unsafe: Mapping[Digest, bytearray]
    ) -> list[tuple[Cover, bytes]]:
        """(cover, payload) of ours up to round `number` that missed their final sets. Raises DiskFault.

        `unsafe`: payloads that may not be files yet. What the disk damaged is left out: its values are not known
        any more.
        """
        missed = [p for p in self.pending if p.round <= number and p.payload not in included]
        with disk(self._spool):
            found = [(p, self._bytes_of(p, unsafe)) for p in missed]
        return [(cover_of(self._spec, p.round, p.experts), payload) for p, payload in found if payload is not None]

    @staticmethod
    def _bytes_of(pending: w.Pending, unsafe: Mapping[Digest, bytearray]) -> bytes | None:
        if pending.payload in unsafe:
            return bytes(unsafe[pending.payload])
        return Path(pending.path).read_bytes() if _is_whole(pending) else None

    def settle(self, number: int, missed: list[tuple[Cover, bytes]]) -> None:
        """Payloads up to `number` are decided: what missed its final set returns to the error feedback."""
        for cover, payload in missed:
            self._give_back(payload, cover)
        self.pending = tuple(p for p in self.pending if p.round > number)

    def _give_back(self, payload: bytes, cover: Cover) -> None:
        said_N4096 = torch.zeros((size_of(cover), CHUNK))
        self._codec.give_back(said_N4096, payload)
        for at, span in slabs(cover, SLAB_CHUNKS):
            self.residual_C4096[span.start : span.stop] += said_N4096[at : at + span.stop - span.start]

    def load(self, residual_C4096: Tensor, pending: tuple[w.Pending, ...]) -> None:
        """Take over a saved state. A payload that is not whole any more is not pending."""
        self.residual_C4096.copy_(residual_C4096)
        self.pending = tuple(filter(_is_whole, pending))

    def sweep(self, pending: tuple[w.Pending, ...]) -> None:
        """Delete spooled payloads but these; the blob store has its own names for them. Raises DiskFault."""
        keep = {Path(one.path).name for one in pending}
        with disk(self._spool):
            for path in self._spool.glob("*.payload"):
                if path.name not in keep:
                    path.unlink(missing_ok=True)

    def _each_slab(self, weights: LocalWeights, cover: Cover, work: Work) -> list[object]:
        """What `work` gives for every slab, by all threads together. Each thread has one buffer for its slabs."""
        most = max(1, SLAB_CHUNKS // self._threads)

        def share(first: int) -> list[object]:
            into_M4096 = torch.empty((most, CHUNK))
            mine = islice(slabs(cover, most), first, None, self._threads)
            return [work(at, span, weights.rows(span, into_M4096)) for at, span in mine]

        if self._threads == 1:
            return share(0)
        with ThreadPoolExecutor(max_workers=self._threads) as pool:
            return [found for each in pool.map(share, range(self._threads)) for found in each]


def _is_whole(pending: w.Pending) -> bool:
    """Whether the payload still lies in the spool. An older generation may name one that was swept."""
    path = Path(pending.path)
    with disk(path):
        return path.exists() and manifest_of_bytes(map_file(path)).id == pending.payload
