"""Steps of a worker session, on a device of which it may have only a part (`bench experts --device cuda`)."""

import msgspec
import torch

from atoll.node.worker.multi_device.group import limit_memory
from atoll.node.worker.session import Session
from atoll.protocols.errors import LocalFault
from atoll.protocols.local.worker_messages import StartRequest, TrainProgress, TrainReply, TrainRequest


class Outcome(msgspec.Struct, frozen=True):
    """What became of a process that was to take some steps."""

    steps: int
    """Those that it took."""
    out_of_memory: bool
    peak_bytes: int
    """Of tensors on the device, at most; 0 on the host, which does not count them."""


def gpu_bytes() -> int:
    """Memory of the first CUDA device; 0 where torch finds none."""
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0


def train(start: StartRequest, ask: TrainRequest, cap: int) -> Outcome:
    """Train one round. `cap`: bytes of the GPU that this process may have from now on; 0: all there are.

    Only out of memory is an outcome; every other failure is raised. A step that does not fit with one sequence and
    layers recomputed is a LocalFault; of what lies beside the steps torch's own error comes.
    """
    on_gpu = start.device != "cpu"
    if on_gpu and cap:
        limit_memory(start.device, cap / gpu_bytes())
    steps, short = 0, False
    try:
        session = Session(start)
        for event in session.train(ask):
            if isinstance(event, TrainProgress):
                steps = event.step
            elif isinstance(event, TrainReply):
                steps = ask.steps
        session.close()
    except (torch.OutOfMemoryError, LocalFault) as error:
        if isinstance(error, LocalFault) and "out of memory" not in str(error):
            raise
        short = True
    return Outcome(steps, short, torch.cuda.max_memory_allocated(start.device) if on_gpu else 0)
