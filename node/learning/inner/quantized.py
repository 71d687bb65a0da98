"""Moments of an optimizer in eight bits a value: codes of a table, and the largest value of each block of 256.

Dettmers et al., 8-bit Optimizers via Block-wise Quantization (arXiv 2110.02861). The table is their dynamic tree:
finest near the block's largest value, and coarse down to a millionth of it. First moments have signs. Of second
moments the square root is stored, because steps divide by it and its range is half as wide.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from atoll.protocols.errors import CorruptFault
from atoll.protocols.run.moments import KINDS

BLOCK = 256
"""Values that share a scale."""
SLAB_VALUES = 1 << 20
"""Values that are float32 at once, at least a row of a matrix."""
_DECADES = 7
CODES, SCALES = "_int8", "_scale"
"""Behind the name of a moment: its codes `[N]` uint8, padded to whole blocks, and scales `[N / 256]` float32."""


class Quantized(NamedTuple):
    """A moment as it is stored."""

    codes_N: Tensor
    scales_B: Tensor


def encoded(kind: str, values: Tensor) -> Quantized:
    """A moment, float32 of any shape, in eight bits. Values are in row-major order."""
    is_signed = kind == KINDS[0]
    flat = (values if is_signed else values.sqrt()).reshape(-1)
    rows_BN = functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scales_B = rows_BN.abs().amax(1)
    # A block of zeros has no scale; any number in its place gives zeros again.
    shares_BN = rows_BN / torch.where(scales_B > 0, scales_B, 1.0)[:, None]
    codes_BN = torch.bucketize(shares_BN, _borders(is_signed, values.device), out_int32=True)
    if not is_signed:
        codes_BN.clamp_(min=1)  # a step divides by it: what is not zero must not become zero
    return Quantized(codes_BN.to(torch.uint8).view(-1), scales_B)


def decoded(kind: str, stored: Quantized, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """A moment of this shape in float32."""
    is_signed = kind == KINDS[0]
    table = _table(is_signed, stored.codes_N.device)
    rows_BN = table[stored.codes_N.int()].view(-1, BLOCK).mul_(stored.scales_B[:, None])
    flat = rows_BN.view(-1)[: torch.Size(shape).numel()].view(shape)
    return flat if is_signed else flat.square_()


def named(kind: str, stored: Quantized) -> dict[str, Tensor]:
    """The tensors of a stored moment by their names in an optimizer's state."""
    return {kind + CODES: stored.codes_N, kind + SCALES: stored.scales_B}


def moment_of(state: Mapping[str, Tensor], kind: str, shape: torch.Size) -> Tensor:
    """A moment of such a state in float32."""
    return decoded(kind, Quantized(state[kind + CODES], state[kind + SCALES]), shape)


def saved_moment(
    tensors: Mapping[str, Tensor], kind: str, atom: str, shape: tuple[int, ...] | torch.Size
) -> Tensor:
    """A moment of a saved state in float32, in whichever form it was saved. Raises CorruptFault."""
    found = tensors.get(f"{kind}/{atom}")
    if found is None and (stored := saved_quantized(tensors, kind, atom, shape)) is not None:
        return decoded(kind, stored, shape)
    if found is None or found.shape != shape:
        raise _unfit(atom)
    return found


def saved_quantized(
    tensors: Mapping[str, Tensor], kind: str, atom: str, shape: tuple[int, ...] | torch.Size
) -> Quantized | None:
    """A moment that was saved in eight bits; None if it was not. Raises CorruptFault for another size."""
    codes = tensors.get(f"{kind}{CODES}/{atom}")
    if codes is None:
        return None
    scales, blocks = tensors.get(f"{kind}{SCALES}/{atom}"), -(-torch.Size(shape).numel() // BLOCK)
    if scales is None or codes.shape != (blocks * BLOCK,) or scales.shape != (blocks,):
        raise _unfit(atom)
    return Quantized(codes, scales)


def slabs(shape: torch.Size) -> Iterator[tuple[slice, slice]]:
    """(rows, blocks) of a matrix or vector, slab by slab: each slab but the last has whole blocks."""
    width = shape[1] if len(shape) > 1 else 1
    unit = BLOCK // gcd(BLOCK, width)
    step = max(1, SLAB_VALUES // (unit * width)) * unit
    for first in range(0, shape[0], step):
        stop = min(first + step, shape[0])
        yield slice(first, stop), slice(first * width // BLOCK, -(-stop * width // BLOCK))


@cache
def _table(is_signed: bool, device: torch.device) -> Tensor:
    """The 256 values of the codes, rising: zero, one, and means of ever finer parts of each decade."""
    values = [0.0, 1.0]
    for decade in range(_DECADES):
        parts = torch.linspace(0.1, 1.0, 2 ** (decade if is_signed else decade + 1) + 1, dtype=torch.float64)
        means = (parts[:-1] + parts[1:]) / 2 * 10.0 ** (decade + 1 - _DECADES)
        values += means.tolist() + ((-means).tolist() if is_signed else [])
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


@cache
def _borders(is_signed: bool, device: torch.device) -> Tensor:
    """Between which of them the nearest one changes."""
    table = _table(is_signed, device)
    return (table[:-1] + table[1:]) / 2


def _unfit(atom: str) -> CorruptFault:
    return CorruptFault(f"the saved optimiser state does not fit {atom}")
