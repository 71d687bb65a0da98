"""The process that writes a sample text for the web page: one answer, then it ends.

It takes what nobody else wants: it yields processor and disk to all others, computes on one thread of the CPU, and
is the first that the kernel ends where memory runs out. What it raises ends it, with the traceback in its log.
"""

import contextlib
import os
import resource
import sys
from pathlib import Path

import msgspec
import psutil

from atoll.node.config.home import Home
from atoll.node.daemon.samples.written import MAX_TOKENS, TEXT_CHARACTERS, WrittenSample
from atoll.node.runs.run_files import run_with_id
from atoll.p2p.blobs.store import BLOBS
from atoll.protocols.errors import AtollError, ConfigError
from atoll.protocols.ids import RunId

FILE_BYTES = 64 << 20
"""Most bytes of a file that this process writes: of its log above all."""
NICEST = 19
FIRST_TO_GO = 1000


def main(home: str, run: str, data: str) -> None:
    """Write a sample by the newest saved weights of a run. `data`: the path of the text of a `file:` source."""
    # Packages print: what they print is for the log, and stdout is for the answer.
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    yield_to_others()
    try:
        answer = _written(Home(Path(home)), RunId(bytes.fromhex(run)), data)
    except AtollError as error:
        answer = WrittenSample(why=error.line()[:TEXT_CHARACTERS])
    with open(answers, "wb") as file:
        file.write(msgspec.json.encode(answer))


def yield_to_others() -> None:
    """Take the lowest priority for processor and disk, and the first place among what ends if memory runs out.

    Each of these is left out where the system has no such thing.
    """
    with contextlib.suppress(OSError):
        os.nice(NICEST - os.nice(0))
    # Linux may compare sessions before it compares their processes: niceness within a session of one is nothing.
    for name, value in (("autogroup", NICEST), ("oom_score_adj", FIRST_TO_GO)):
        with contextlib.suppress(OSError):
            Path(f"/proc/self/{name}").write_text(str(value), encoding="ascii")
    if hasattr(os, "SCHED_IDLE"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    if hasattr(psutil, "IOPRIO_CLASS_IDLE"):
        with contextlib.suppress(OSError, psutil.Error):
            psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))


def _written(home: Home, wanted: RunId, data: str) -> WrittenSample:
    """Raises AtollError."""
    found = run_with_id(home, wanted)
    if found is None:
        raise ConfigError("the run is not in this home any more")
    # Seconds of imports, which are yielded to all others by now.
    import torch

    from atoll.node.generation.loading import load_run
    from atoll.node.generation.options import TextOptions
    from atoll.node.import_export.export_run import saved_weights

    torch.set_num_threads(1)
    folder = home.run(wanted)
    weights = saved_weights(found.spec, folder)
    model = load_run(found.spec, weights, folder / BLOBS, data, "cpu")
    text = model.generate(model.tokens_of(""), TextOptions(max_tokens=MAX_TOKENS)).text
    return WrittenSample(round=weights.round, text=text[:TEXT_CHARACTERS])


if __name__ == "__main__":
    main(*sys.argv[1:4])
