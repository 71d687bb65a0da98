"""A GPU as the place where a worker encodes; and whether this one may be, which is tried before it is believed."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from atoll.node.learning.compress.blocks import Blocks
from atoll.node.learning.compress.codecs import HOST, Encoder, OnHost, UnfinishedPayload
from atoll.node.learning.compress.gpu.encoding import (
    EncodeArrays,
    blank_payload,
    can_encode,
    encode_rows,
    is_sound,
)
from atoll.node.learning.kernels.on_gpu import FAULTS
from atoll.protocols.errors import Divergence
from atoll.protocols.run.arena import CHUNK
from atoll.protocols.run.payload import Layout

SLAB_CHUNKS = 1 << 14
"""256 MiB of local weights at a time: enough programs for every part of the device."""
_TRIED_CHUNKS = 7


class OnDevice:
    """The kernels of `encode_rows`. One thread launches."""

    threads = 1
    reads_blocks = False
    slab_chunks = SLAB_CHUNKS

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def is_sound(self, local: Tensor | Blocks) -> bool:
        assert isinstance(local, Tensor)
        return is_sound(local)

    def begin(self, layout: Layout, tensor_C: Sequence[int] | None = None) -> UnfinishedPayload:
        return _DevicePayload(layout, self.device)


class _DevicePayload:
    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout = layout
        self._bytes = blank_payload(layout, device)

    def fill(
        self, at: int, residual_C4096: Tensor, anchor_C4096: Tensor, local: Tensor | Blocks, beta: float
    ) -> None:
        assert isinstance(local, Tensor)
        # In place: the worker asks `is_sound` of all slabs before, so no Divergence can lose a residual.
        arrays = EncodeArrays(residual_C4096, residual_C4096, anchor_C4096, local)
        encode_rows(self._bytes, self._layout, at, arrays, beta)

    def whole(self) -> bytearray:
        return bytearray(self._bytes.cpu().numpy())


def fault_of(device: torch.device, layout: Layout, beta: float) -> str:
    """Why a device cannot encode for this codec and k; empty where it can. All machine code is made here.

    Some chunks, each hard in one way, are encoded on it and on the host: payload and e must be the same bits.
    """
    if not can_encode(layout):
        return f"there are no kernels for {layout.codec} with k = {layout.k}"
    # A compiler of another version may contract or reorder operations: the device is used only if a trial gives
    # the host's bits, because a run may be moved between the two at any restart.
    try:
        same = _encoded(OnDevice(device), layout, beta) == _encoded(OnHost(), layout, beta)
    except (*FAULTS, Divergence) as error:
        lines = str(error).strip().splitlines()
        return f"its kernels do not run: {type(error).__name__}: {lines[0] if lines else ''}"
    return "" if same else "its kernels do not give the host's bits"


def _encoded(encoder: Encoder, layout: Layout, beta: float) -> tuple[bytes, bytes]:
    """Payload and new e of the trial, in two slabs."""
    residual, anchor, local = (each.to(encoder.device) for each in _trial())
    payload = encoder.begin(Layout(layout.codec, _TRIED_CHUNKS, layout.k))
    # Two slabs of different sizes, as a worker encodes: the second begins in the middle of the payload.
    for rows in (slice(0, 4), slice(4, _TRIED_CHUNKS)):
        payload.fill(rows.start, residual[rows], anchor[rows], local[rows], beta)
    # `local / 0` holds nothing but infinities and NaN: the check must see them.
    sound = encoder.is_sound(local) and not encoder.is_sound(local / 0)
    return bytes(payload.whole()), residual.to(HOST).numpy().tobytes() if sound else b""


def _trial() -> tuple[Tensor, Tensor, Tensor]:
    """e, anchor and local weights: usual ones, ties, zeros, subnormals, few values, equal ones, huge ones."""
    # numpy's: torch's own needs what a worker does not import (lean_torch.py), and raises there.
    made = np.random.Generator(np.random.Philox(1))
    anchor, step, residual = torch.from_numpy(made.standard_normal((3, _TRIED_CHUNKS, CHUNK), np.float32))
    anchor *= 0.02
    local = anchor + step * 1e-3
    local[1:6] = anchor[1:6]
    residual *= 1e-3
    residual[1] = torch.from_numpy(made.integers(-3, 4, CHUNK))
    residual[2] = 0
    residual[3] *= 1e-38
    residual[4, 40:] = 0
    residual[5] = -1
    residual[6] = (residual[6] * 1e3) ** 5 * 1e9
    return residual, anchor, local
