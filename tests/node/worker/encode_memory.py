"""Peak extra memory of an encode: `python encode_memory.py RUNSPEC_HEX THREADS`; prints JSON, smallest first."""

import ctypes
import gc
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from atoll.node.learning.compress.codecs import OnHost
from atoll.node.learning.model.decoder import Decoder
from atoll.node.worker.error_feedback import ErrorFeedback
from atoll.node.worker.local_weights import LocalWeights
from atoll.protocols import codec
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.run_spec import RunSpec

TURNS = 3


def resident(field: str) -> int:
    """Bytes of `VmRSS` or `VmHWM`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def extra_bytes(work: Callable[[], object]) -> int:
    """Most resident memory while `work` runs, over the memory before it. Raises OSError where nobody tells."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed must not hide what is taken
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before


def main(spec: RunSpec, threads: int) -> dict[str, object]:
    torch.set_num_threads(1)
    module = Decoder(spec.model)
    weights = LocalWeights(module, spec)
    weights.start(torch.zeros((arena_of(spec.model).chunks, 4096), dtype=torch.int32))
    for parameter in module.parameters():
        parameter.data.normal_(0, 1e-3)
    with tempfile.TemporaryDirectory() as folder:
        sending = ErrorFeedback(spec, Path(folder), OnHost(threads))
        sending.residual_C4096.fill_(0)  # from here on every page of it is there
        sending.encode(0, weights)  # compiles
        extra = sorted(extra_bytes(lambda: sending.encode(0, weights)) for _ in range(TURNS))
    return {"parameters": spec.model.parameters, "extra_bytes": extra}


if __name__ == "__main__":
    print(json.dumps(main(codec.decode(bytes.fromhex(sys.argv[1]), RunSpec), int(sys.argv[2]))))
