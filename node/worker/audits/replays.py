"""Whether a payload was sent in an earlier round: as it is, with noise, or at another scale (docs/audits.md).

A sparse payload says which values it sends, and which way each of them goes. Error feedback makes a member send
other values in each round, so honest payloads of two rounds have few of these in common. A scale changes none of
them, and noise that changes a quarter of them costs the copy a part of its worth.
"""

from collections.abc import Sequence

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from atoll.node.checkpoint.disk import map_payload
from atoll.node.learning.compress.folding import decode
from atoll.protocols.ids import Digest, Round
from atoll.protocols.local.worker_messages import Member
from atoll.protocols.run.arena import CHUNK
from atoll.protocols.run.payload import Layout, check_frame

SAMPLED = 64
"""Chunks that are compared, or all of a smaller model: 4,096 values at the usual k of 64."""
LEAST = 512
"""Fewest values that are compared. Where 40 % are expected to agree, 75 % do with a probability below e⁻¹²⁵
(Hoeffding); 40 % is what updates have in common of which two thirds repeat, honest members had 26 %."""
MOST = 4096
"""Most payloads that are remembered, of 32 KiB each: those of 32 rounds of 128 members."""

Signs = NDArray[np.int64]
"""Rising numbers of the values that a payload sends in the sampled chunks, each with its direction."""


class SentPayloads:
    """The payloads of earlier rounds, in chunks that this process drew: nobody else knows which to change."""

    def __init__(self, layout: Layout, rng: Generator) -> None:
        self._layout = layout
        drawn = rng.choice(layout.chunks, min(SAMPLED, layout.chunks), replace=False)
        self._chunks: NDArray[np.int64] = np.sort(drawn).astype(np.int64)
        self._sent: dict[Digest, tuple[Round, Signs]] = {}

    def add(self, number: Round, *members: Member) -> None:
        """Remember payloads of a round; of equal ones the earliest. Raises DecodeError, CorruptFault."""
        for member in members:
            payload = Digest(member.payload)
            if payload not in self._sent and not self._layout.is_dense:
                self._sent[payload] = number, self._signs(member)
        while len(self._sent) > MOST:
            self._sent.pop(next(iter(self._sent)))

    def holds_like(self, member: Member, before: Round) -> bool:
        """Whether a payload of rounds below `before` has three quarters of these values; false for dense codecs.

        Raises DecodeError, CorruptFault.
        """
        if self._layout.is_dense:
            return False
        mine = self._signs(member)
        return any(number < before and _alike(mine, sent) for number, sent in self._sent.values())

    def twin(self, member: Member, round_members: Sequence[Member]) -> Member | None:
        """Another contribution of the same round that has this one's values: one is a copy.

        Raises DecodeError, CorruptFault.
        """
        others = (each for each in round_members if each.entry != member.entry)
        return next((each for each in others if self.is_copy(each, member)), None)

    def is_copy(self, one: Member, other: Member) -> bool:
        """Whether two payloads have three quarters of their values in common; of dense codecs, whether all.

        Raises DecodeError, CorruptFault.
        """
        if one.payload == other.payload:
            return True
        return not self._layout.is_dense and _alike(self._signs(one), self._signs(other))

    def _signs(self, member: Member) -> Signs:
        if known := self._sent.get(Digest(member.payload)):
            return known[1]
        payload = map_payload(member.path)
        check_frame(payload, self._layout)
        table = decode(_rows(payload, self._layout, self._chunks), self._sampled)
        index_Sk, q_Sk = table.index_Ck.numpy(), table.q_Ck.numpy()
        place_Sk = np.arange(len(self._chunks))[:, None] * CHUNK + index_Sk
        found: Signs = (2 * place_Sk + (q_Sk < 0))[q_Sk != 0]
        return np.sort(found)

    @property
    def _sampled(self) -> Layout:
        return Layout(self._layout.codec, len(self._chunks), self._layout.k)


def _alike(one: Signs, other: Signs) -> bool:
    most = max(len(one), len(other))
    return most >= LEAST and 4 * len(np.intersect1d(one, other, assume_unique=True)) >= 3 * most


def _rows(payload: memoryview, layout: Layout, chunks: NDArray[np.int64]) -> bytes:
    """The payload of these chunks alone, as if the model had no others."""
    sections = []
    for first, size in zip(layout.offsets, layout.row_bytes, strict=True):
        rows_CB = np.frombuffer(payload, np.uint8, layout.chunks * size, first).reshape(layout.chunks, size)
        sections.append(rows_CB[chunks].tobytes())
    return b"".join([Layout(layout.codec, len(chunks), layout.k).header, *sections])
