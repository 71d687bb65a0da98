"""Machine code of every launch, made without a GPU; `test_gpu.py` runs this in a process of its own.

Prints a line for each: its name, how many operations are fused, flush subnormals or divide inexactly, and how many
quotients of float64 are rounded to the nearest.
"""

import re

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from atoll.node.compress.folding import Step
from atoll.node.compress.gpu.encoding import encode_into
from atoll.node.compress.gpu.folding import fold_into, update_of
from atoll.node.compress.sparse2 import encode
from atoll.protocols.payload import Layout

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
        encode_into(arrays[2], *arrays, 0.95, Layout("sparse2", chunks, k))
        members, theta = [(1, encode(arrays[0], k))] * chunks, torch.zeros((chunks, 4096), dtype=torch.int32)
        update_of(members, chunks, k, Step(256, 64), codec="sparse2", device=torch.device("cpu"))
        fold_into(theta, members, k, Step(256, 64), theta.clone(), codec="sparse2")
    for name, found in made:
        code = found.asm["ptx"]
        inexact = re.findall(INEXACT, code)
        print(name, len(inexact), len(re.findall(r"div\.rn\.f64", code)))


if __name__ == "__main__":
    main()
