"""Machine code of every launch, made without a GPU; `test_gpu.py` runs this in a process of its own.

Prints a line for each: its name, how many operations are fused, flush subnormals or divide inexactly, and how many
quotients of float64 are rounded to the nearest. Fails where an encoding of another size needs other machine code.
"""

import re

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from atoll.node.learning.compress.gpu.encoding import EncodeArrays, blank_payload, encode_rows
from atoll.protocols.run.payload import Layout

INEXACT = r"\bfma\.|\.ftz|\.approx|div\.full|\bmad\.(?:rn|ftz)"


class Nowhere:
    """Enough of a driver to compile for GPUs that are not there; a device's number is its compute capability."""

    def __init__(self, capability):
        self.capability = capability

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return self.capability

    def get_current_stream(self, _):
        return 0


def in_parts(k):
    """As a worker encodes, e in place; slabs of many sizes, at many places of the payload."""
    layout, arrays = Layout("sparse2", 70, k), [torch.zeros((70, 4096)) for _ in range(3)]
    payload, at = blank_payload(layout, torch.device("cpu")), 0
    for size in (1, 16, 2, 32, 19):
        rows = [each[at : at + size] for each in arrays]
        encode_rows(payload, layout, at, EncodeArrays(rows[0], *rows), 0.5)
        at += size


def main():
    made = []
    launch = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        assert kwargs["enable_fp_fusion"] is False
        made.append((self.__name__, launch(self, *args, grid=grid, warmup=True, **kwargs)))

    JITFunction.run = compile_only
    for capability, chunks, k in ((80, 1, 3), (90, 16, 64)):
        triton.runtime.driver.set_active(Nowhere(capability))
        arrays = [torch.zeros((chunks, 4096)) for _ in range(3)]
        layout = Layout("sparse2", chunks, k)
        encode_rows(blank_payload(layout, torch.device("cpu")), layout, 0, EncodeArrays(arrays[2], *arrays), 0.95)
        known = {id(found) for _, found in made}
        in_parts(k)
        assert {id(found) for _, found in made} == known, "a worker would compile in the middle of a round"
    for name, found in {id(found): (name, found) for name, found in made}.values():
        code = found.asm["ptx"]
        inexact = re.findall(INEXACT, code)
        print(name, len(inexact), len(re.findall(r"div\.rn\.f64", code)))


if __name__ == "__main__":
    main()
