"""Times on a GPU of the kernels, of the published pipeline and of the device's memcpy, in turns; and whether the
kernels' bits are the CPU's. `atoll bench compress --device cuda`."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from atoll.node.learning.compress.encoding import encode_residual
from atoll.node.learning.compress.gpu.encoding import EncodeArrays, blank_payload, encode_rows
from atoll.node.worker.multi_device.group import check_device
from atoll.protocols.run.payload import Layout
from atoll_bench.compress import codec_pace as pace
from atoll_bench.compress.codec_pace import BETA, K, Paces


class Work(pace.Work):
    """As `pace.Work`; e goes to and fro between two arrays."""

    def __init__(self, chunks: int, device: str) -> None:
        super().__init__(chunks, device)
        self.layout = Layout("sparse2", chunks, K)
        self.spare = torch.empty_like(self.residual)
        self.said = torch.empty(0)

    def encode(self) -> bytes:
        """Ours; the payload stays on the device, as theirs does."""
        self.said = encode_into(self.spare, self.residual, self.base_float, self.local, BETA, self.layout)
        self.residual, self.spare = self.spare, self.residual
        return b""

    def fetch(self) -> bytes:
        """The payload, in the host's memory."""
        return bytes(self.said.cpu().numpy())

    def ways(self) -> dict[str, Callable[[], object]]:
        """Encoding alone: a node folds on the CPU."""
        return {"encode": self.encode, "encode published": self.encode_published}


def encode_into(
    out_C4096: Tensor,
    residual_C4096: Tensor,
    anchor_C4096: Tensor,
    local_C4096: Tensor,
    beta: float,
    layout: Layout,
) -> Tensor:
    """Payload (uint8, on the device) of β·e + (anchor − local) of whole arrays; the new e goes to `out`."""
    payload = blank_payload(layout, residual_C4096.device)
    encode_rows(payload, layout, 0, EncodeArrays(out_C4096, residual_C4096, anchor_C4096, local_C4096), beta)
    return payload


def measure(chunks: int, same_chunks: int, turns: int, say: Callable[[str], None], device: str = "cuda") -> Paces:
    """Everything; the bits of the first `same_chunks` chunks are held against the CPU's before.

    `extra_bytes`: the most that the encoder allocates. Raises ConfigError where there is no such device.
    """
    check_device(device)
    paces, began = Paces(), time.perf_counter()
    work = Work(chunks, device)
    settle(device)
    say(f"arrays made in {time.perf_counter() - began:.0f} s")
    paces.take("first", work.encode)
    paces.first_call_s = paces.seconds.pop("first")[0]
    paces.errors = {}
    paces.differs = differences(work, min(chunks, same_chunks))
    say(f"compared with the CPU after {time.perf_counter() - began:.0f} s")
    work.encode()
    paces.ours_bytes = len(work.fetch())
    paces.published_bytes = sum(sent.size_bytes for sent in work.encode_published())
    paces.extra_bytes = _peak_bytes(work, device)
    pace.take_turns(paces, work, turns, say, lambda: settle(device))
    paces.take("fetch", work.fetch)
    return paces


def settle(device: str) -> None:
    """Wait for what was begun on the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def differences(work: Work, chunks: int) -> list[str]:
    """What is not the CPU's, bit for bit, of one encoding of the first chunks."""
    residual, anchor, local = (each[:chunks] for each in (work.residual, work.base_float, work.local))
    ours = [each.to("cpu", copy=True) for each in (residual, anchor, local)]
    left = torch.empty_like(residual)
    said = encode_into(left, residual, anchor, local, BETA, Layout("sparse2", chunks, K))
    layout = Layout("sparse2", chunks, K)
    payload = encode_residual(ours[0], ours[1], ours[2], BETA, layout)
    pairs = {"payload": bytes(said.cpu().numpy()) == payload, "e": _same(left, ours[0])}
    return [name for name, is_same in pairs.items() if not is_same]


def _same(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.cpu().view(torch.int32), expected.view(torch.int32))


def _peak_bytes(work: Work, device: str) -> int | None:
    if device != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work.encode()
    return torch.cuda.max_memory_allocated() - before
