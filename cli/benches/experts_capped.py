"""Steps of a worker session on a device of which the process may have only so much: what `bench experts` asks of
its child.
"""

from pathlib import Path

import torch

from atoll.cli.benches.experts_gpu import FROZEN, Outcome
from atoll.cli.benches.experts_members import MEMBERS, Members
from atoll.protocols import worker as w
from atoll.protocols.experts import ALL
from atoll.protocols.ids import Round
from atoll.protocols.run import RunSpec


def train(folder: Path, spec: RunSpec, trained: str, device: str, cap: int) -> Outcome:
    """A round of the first member, which trains its share or `all`. `cap`: bytes of the device; 0: all there are.

    Only out of memory is an outcome; every other failure is raised.
    """
    on_gpu = device != "cpu"
    if on_gpu and cap:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(cap / total, device)
    members = Members(folder, spec, MEMBERS, device, FROZEN)
    ask = w.Train(Round(0), 0, MEMBERS, spec.steps(0), -1, ALL if trained == "all" else members.shares[0])
    steps, short = 0, False
    try:
        with members.session(0) as session:
            for event in session.train(ask):
                if isinstance(event, w.Progress):
                    steps = event.step
                elif isinstance(event, w.Trained):
                    steps = ask.steps
    except torch.OutOfMemoryError:
        short = True
    return Outcome(steps, short, torch.cuda.max_memory_allocated(device) if on_gpu else 0)
