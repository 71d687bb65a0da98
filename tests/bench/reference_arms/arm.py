"""Run one reference arm in a process: `python -m atoll_bench.reference_arms.arm ARM RUN BLOBS MEMBERS ROUNDS
OUT`.

Arms: `adamw` (data-parallel at equal tokens), `diloco` (dense, Nesterov, tuned), `average` (dense, plain mean),
all with AdamW for all weights whatever the run has,
and `unigram` (byte entropy of the validation text). BLOBS is a folder with the files that travel with the run.
MEMBERS: their number, or one for each round with commas between. Writes JSON, whole or not at all; each trained
round is a line on standard output.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from atoll.node.learning.data import corpus
from atoll.node.learning.data.dataset import GivenTokenizer, open_dataset
from atoll.node.learning.data.shakespeare import default_cache
from atoll.node.runs.presets import with_adamw
from atoll.p2p.blobs.store import blob_path
from atoll.p2p.system.atomic_files import write_whole
from atoll.protocols.errors import AtollError
from atoll.protocols.run.run_spec import open_run
from atoll_bench.reference_arms.baselines import (
    AVERAGE,
    TUNED,
    Task,
    data_parallel,
    dense_diloco,
    unigram_bits_per_byte,
)


def arm(name: str, run_file: Path, blobs: Path, present: Sequence[int], rounds: int) -> dict[str, Any]:
    """The curve of one arm. Raises ConfigError."""
    torch.set_num_threads(1)
    spec = open_run(run_file.read_bytes())
    if name == "unigram":
        text = corpus.load_corpus(spec.data.source, "", default_cache())
        return {"arm": name, "unigram_bpb": unigram_bits_per_byte(text.val)}
    tokenizer = spec.data.tokenizer_blob
    given = GivenTokenizer(blob_path(blobs, tokenizer), spec.model.vocab) if tokenizer else None
    data = open_dataset(spec.data, spec.model.context, "", default_cache(), given)
    spec = msgspec.structs.replace(spec, inner=with_adamw(spec.inner))
    start = blob_path(blobs, spec.start.weights) if spec.start else None
    task = Task(spec, data, max(present), rounds, start=start, present=present)
    rule = TUNED if name == "diloco" else AVERAGE
    points = data_parallel(task) if name == "adamw" else dense_diloco(task, rule)
    curve = []
    for point in points:
        curve.append(msgspec.structs.asdict(point))
        sys.stdout.write(f"{point.round + 1}/{rounds}\n")
        sys.stdout.flush()
    return {"arm": name, "members": list(present), "points": curve}


def main() -> int:
    """Write the result; one line on stderr and exit 1 when it cannot be made."""
    name, run_file, blobs, members, rounds, out = sys.argv[1:7]
    try:
        present = [int(count) for count in members.split(",")]
        present = present * int(rounds) if len(present) == 1 else present
        found = arm(name, Path(run_file), Path(blobs), present, int(rounds))
        write_whole(Path(out), json.dumps(found).encode())
    except AtollError as error:
        sys.stderr.write(f"error: {error.line()}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
