"""Payloads with a k for each tensor (`compress.sizes`): a header that says which, then a payload of each tensor.

    header   "atlk" | u8 version | u8 measured | u16 tensors
    ks       u8 per tensor: number of its k in `compress.sizes.ks`
    errors   u16 per tensor and k of the list, if measured: 16·log2 of the squared error that this k would leave
             of what the author had to send, plus 2¹⁵
    parts    a payload of `sparse2` (payload.py) of the chunks of each tensor, with its k

The tensors are the matrices in the arena's order, then all vectors together. A payload is never longer than one of
`compress.k` everywhere. See `docs/wires/payload.md`.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import msgspec

from atoll.protocols.errors import DecodeError
from atoll.protocols.run.arena import Span, arena_of
from atoll.protocols.run.model_spec import ModelSpec
from atoll.protocols.run.payload import Layout
from atoll.protocols.wires import SIZED_PAYLOAD

MAGIC = b"atlk"
VERSION = SIZED_PAYLOAD.newest
CODEC = "sparse2"
_HEAD = struct.Struct("<4sBBH")


@lru_cache(maxsize=32)
def tensors_of(model: ModelSpec) -> tuple[Span, ...]:
    """The chunks of each matrix, then those of all vectors: what has a k."""
    arena = arena_of(model)
    firsts = [place.first_chunk for place in arena.placements if len(place.shape) == 2]
    last = max((place.first_chunk for place in arena.placements if len(place.shape) == 1), default=arena.chunks)
    ends = [*firsts, *([last] if last < arena.chunks else []), arena.chunks]
    return tuple(Span(start, stop) for start, stop in pairwise(ends))


def table_numbers(spec: Any) -> int:
    """Numbers of the table of k that a RunSpec's state has behind Θ; 0 without `compress.sizes`."""
    return len(tensors_of(spec.model)) if spec.compress.sizes else 0


def sized_layout(spec: Any, number: int) -> "SizedLayout":
    """What the payloads of round `number` can be, of a RunSpec with `compress.sizes`."""
    compress, chunks_T = spec.compress, tuple(span.chunks for span in tensors_of(spec.model))
    return SizedLayout(chunks_T, compress.sizes.ks, compress.k, compress.sizes.is_measured(number))


class SizedLayout(msgspec.Struct, frozen=True):
    """What the payloads of a round can be: of these tensors, with a k of this list each."""

    chunks_T: tuple[int, ...]
    """Chunks of each tensor."""
    ks: tuple[int, ...]
    uniform: int
    """`compress.k`, one of `ks`."""
    is_measured: bool
    chosen_T: tuple[int, ...] = ()
    """k of each tensor in the payload that is made; empty: `uniform` everywhere."""

    @property
    def head_bytes(self) -> int:
        """Bytes in front of the parts."""
        errors = 2 * len(self.chunks_T) * len(self.ks) if self.is_measured else 0
        return _HEAD.size + len(self.chunks_T) + errors

    @property
    def most_bytes(self) -> int:
        """The largest legal length, that of `uniform` everywhere; any payload of the round has at most so many."""
        return self.head_bytes + sum(part_bytes(chunks, self.uniform) for chunks in self.chunks_T)

    @property
    def wanted_T(self) -> tuple[int, ...]:
        """k of each tensor."""
        return self.chosen_T or (self.uniform,) * len(self.chunks_T)


class Head(msgspec.Struct, frozen=True):
    """What a payload says of itself."""

    k_T: tuple[int, ...]
    errors_TK: tuple[tuple[int, ...], ...]
    """Of each tensor and each k of the list, in 16ths of log2, plus 2¹⁵; empty where nothing was measured."""
    offsets_T: tuple[int, ...]
    """Where the part of each tensor begins, and in the end the length of all."""


@lru_cache(maxsize=4096)
def part_layout(chunks: int, k: int) -> Layout:
    """Layout of the part of a tensor."""
    return Layout(CODEC, chunks, k)


def part_bytes(chunks: int, k: int) -> int:
    """Bytes of the part of a tensor."""
    return part_layout(chunks, k).size_bytes


def write_head(layout: SizedLayout, errors_TK: Sequence[Sequence[int]] = ()) -> bytes:
    """The bytes in front of the parts of a payload; `errors_TK`: if the round is measured."""
    numbers = bytes(layout.ks.index(k) for k in layout.wanted_T)
    flat = [error for errors_K in errors_TK for error in errors_K]
    head = _HEAD.pack(MAGIC, VERSION, layout.is_measured, len(layout.chunks_T))
    return head + numbers + struct.pack(f"<{len(flat)}H", *flat)


def read_head(payload: bytes | memoryview, layout: SizedLayout) -> Head:
    """What a payload says of itself. Raises DecodeError unless head and length are legal; parts are not read."""
    tensors, sizes = len(layout.chunks_T), len(layout.ks)
    if not layout.head_bytes <= len(payload) <= layout.most_bytes:
        raise DecodeError(
            f"payload of {len(payload)} bytes where {layout.head_bytes} to {layout.most_bytes} are legal"
        )
    found = _HEAD.unpack(payload[: _HEAD.size])
    legal = (MAGIC, VERSION, layout.is_measured, tensors)
    if found != legal:
        raise DecodeError(f"payload begins with {found}; one of this round begins with {legal}")
    numbers = bytes(payload[_HEAD.size : _HEAD.size + tensors])
    if max(numbers) >= sizes:
        raise DecodeError(f"payload: number {max(numbers)} of a k where {sizes} are legal")
    k_T = tuple(layout.ks[number] for number in numbers)
    offsets = tuple(accumulate(map(part_bytes, layout.chunks_T, k_T), initial=layout.head_bytes))
    if offsets[-1] != len(payload):
        raise DecodeError(f"payload of {len(payload)} bytes whose tensors have {offsets[-1]}")
    return Head(k_T, _errors_in(payload, layout), offsets)


def _errors_in(payload: bytes | memoryview, layout: SizedLayout) -> tuple[tuple[int, ...], ...]:
    if not layout.is_measured:
        return ()
    tensors, sizes = len(layout.chunks_T), len(layout.ks)
    flat = struct.unpack_from(f"<{tensors * sizes}H", payload, _HEAD.size + tensors)
    return tuple(flat[at * sizes : (at + 1) * sizes] for at in range(tensors))
