"""Folds of a large model: `python fold_memory.py RUNSPEC_HEX FOLDER`, which waits for a line, then prints JSON.

A first set, a larger one in its place (which needs both of its U), a check, the final set, and a generation.
"""

import json
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from atoll.node.checkpoint import generations
from atoll.node.checkpoint.mapped_arrays import ARRAYS, MappedArrays
from atoll.node.learning.compress.codecs import codec_of
from atoll.node.learning.compress.encoding import blank_payload, encode_rows
from atoll.node.learning.kernels.compiled import Fresh, fresh_like
from atoll.node.learning.outer.fixed import state_header
from atoll.node.learning.outer.fold import Fold, round_set
from atoll.node.worker.folding.fold_requests import fold_of
from atoll.node.worker.folding.set_update import SetUpdate
from atoll.protocols import codec
from atoll.protocols.ids import digest, peer_id_of
from atoll.protocols.local.worker_messages import Member
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.run_spec import RunSpec

SLAB = 64
MEMBERS = 3


def payloads(spec: RunSpec, folder: Path) -> tuple[Member, ...]:
    """Payloads of some members, made slab by slab: in memory is no array of the model's size."""
    layout = codec_of(spec.compress.codec, spec.compress.k).layout(arena_of(spec.model).chunks)
    found = []
    for number in range(MEMBERS):
        source = torch.Generator().manual_seed(number)
        local = torch.randn((SLAB, 4096), generator=source) * 1e-3
        payload, nothing = blank_payload(layout), torch.zeros_like(local)
        for at in range(0, layout.chunks, SLAB):
            rows = slice(0, min(SLAB, layout.chunks - at))
            encode_rows(payload, layout, at, torch.zeros_like(local)[rows], nothing[rows], local[rows], 1.0)
        path, name = folder / f"{number}.payload", digest(bytes(payload))
        path.write_bytes(payload)
        found.append(Member(name, peer_id_of(bytes(32)), 64 + number, name, str(path)))
    return tuple(found)


def folded(spec: RunSpec, members: Sequence[Member], fresh: Fresh) -> tuple[Fold, list[str]]:
    """The fold after all of it, and every digest on the way."""
    fold = fold_of(spec, SetUpdate(spec, None, 1, fresh), 1, fresh)
    seen = [
        fold.prepare_round(round_set(0, members[:2]))(),
        fold.prepare_round(round_set(0, members))(),
        fold.check(round_set(0, members[1:])),
        fold.prepare_final(round_set(0, members))(),
    ]
    return fold, [state.hex() for state in seen]


def most_anonymous(ended: threading.Event, found: list[int]) -> None:
    """Watch RssAnon until `ended`."""
    while not ended.wait(0.005):
        lines = Path("/proc/self/status").read_text().splitlines()
        found.append(next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) << 10)


def main(spec: RunSpec, folder: Path) -> dict[str, object]:
    torch.set_num_threads(1)
    members = [
        Member(digest(path.read_bytes()), peer_id_of(bytes(32)), 64 + at, digest(path.read_bytes()), str(path))
        for at, path in enumerate(sorted(folder.glob("*.payload")))
    ]
    sys.stdin.readline()
    anonymous, ended = list[int](), threading.Event()
    watch = threading.Thread(target=most_anonymous, args=(ended, anonymous))
    watch.start()
    try:
        arrays = MappedArrays(folder / ARRAYS)
        fold, seen = folded(spec, members, arrays.fresh)
        values, path = fold.final_state_S4096, arrays.path_of(fold.final_state_S4096)
        if path is None:
            generations.begin(folder / "state", {"final": values}, b"").finish()
        else:
            saved = generations.SavedArray(values, path, state_header(len(values)), fold.state_digest())
            generations.begin(folder / "state", {}, b"", arrays={"final": saved}).finish()
        found = generations.load(folder / "state")
        assert found is not None
    finally:
        ended.set()
        watch.join()
    return {"states": seen, "most_anonymous": max(anonymous), "parameters": spec.model.parameters}


def expected(spec: RunSpec, folder: Path) -> list[str]:
    """The digests with arrays in the process's own memory; writes the payloads."""
    return folded(spec, payloads(spec, folder), fresh_like)[1]


if __name__ == "__main__":
    print(json.dumps(main(codec.decode(bytes.fromhex(sys.argv[1]), RunSpec), Path(sys.argv[2]))))
