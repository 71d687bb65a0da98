"""Child of `bench experts`: one measurement in a process of its own, so that nothing but it is in memory."""

import asyncio
import os
import resource
import sys
from pathlib import Path
from typing import Any

import psutil
from msgspec.structs import asdict, replace

from atoll.node.import_export.export_run import export_run
from atoll.node.import_export.import_run import importing, store_run
from atoll.node.import_export.join_shards import join_shards
from atoll.node.import_export.save_shard import save_shard
from atoll.node.import_export.source_options import CheckpointSource
from atoll.p2p.system.quick_end import end_process
from atoll.protocols.run.experts import ALL
from atoll.protocols.run.run_spec import sign_run
from atoll_bench.child import Orders, obey
from atoll_bench.experts import logits
from atoll_bench.experts import model_pace as pace
from atoll_bench.experts.experts_gpu import spec_on_gpu, trained_under
from atoll_bench.experts.experts_members import MEMBERS, Members, identity_of, shares_of, spec_of
from atoll_bench.experts.held import arithmetic_bytes, held_by
from atoll_bench.experts.resumed import differing


async def hold(preset: str, trained: str, frozen: str) -> dict[str, Any]:
    """Bytes of a member that trains its share, or all experts. `peak`: what the process grew by, at most."""
    spec = spec_of(preset)
    assert spec.model.experts is not None
    everything = frozenset(range(spec.model.experts.count))
    owned = shares_of(spec, MEMBERS)[0] if trained == "share" else everything
    small = spec_of("moe-smoke")
    # What torch loads at its first step is not ours.
    held_by(replace(small.model, layers=1), small.inner, frozenset({0}), frozen)
    before = psutil.Process().memory_info().rss
    held = held_by(spec.model, spec.inner, owned, frozen)
    return {
        "held": list(held),
        "arithmetic": arithmetic_bytes(spec.model, owned, frozen),
        "peak": _peak_bytes() - before,
    }


def _peak_bytes() -> int:
    """The most that this process had in memory so far."""
    units = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return units if sys.platform == "darwin" else 1024 * units


async def paces(preset: str, sequences: int, turns: int) -> dict[str, list[float]]:
    """CPU seconds of forward and backward, a share trained and all trained."""
    spec = spec_of(preset)
    return pace.measure(spec.model, shares_of(spec, MEMBERS)[0], sequences, turns).seconds


async def payloads(folder: str, preset: str) -> dict[str, Any]:
    """Bytes that each member sends in a round, and that one sends who trains all; the round is then final."""
    spec = spec_of(preset)
    members = Members(Path(folder), spec, MEMBERS)
    sent = [members.contribute(number, 0, share) for number, share in enumerate(members.shares)]
    whole = Members(Path(folder) / "whole", spec, 1)
    whole.folder.mkdir()
    return {
        "shares": [each.payload_bytes for each in sent],
        "whole": whole.contribute(0, 0, ALL).payload_bytes,
        "states": len(members.finalize(0, sent)),
    }


async def logits_of(folder: str, preset: str) -> dict[str, Any]:
    """The largest difference of a logit between our decoder and the exported folder in transformers."""
    spec = spec_of(preset)
    home, to = Members(Path(folder), spec, MEMBERS).home(0), Path(folder) / "exported"
    done = export_run(spec, home, to, None, "")
    return {"difference": logits.difference(spec, home, to), "class": done.class_name}


async def resume(folder: str, preset: str, counts: list[int]) -> dict[str, Any]:
    """Save what the four members have, and go on with other numbers of them: values that differ, of how many."""
    spec, to, runs = spec_of(preset), Path(folder) / "checkpoint", Path(folder) / "runs"
    members = Members(Path(folder), spec, MEMBERS)
    signed = sign_run(spec, identity_of(0))
    for number in range(MEMBERS):
        save_shard(signed, members.home(number), identity_of(number), to)
    checkpoint = join_shards(to)
    runs.mkdir()
    with importing(CheckpointSource(to), runs, spec.seed) as found:
        onward = found.applied(spec, spec.model.context)
        store_run(found, runs / "onward", lambda: None)
    differ: dict[int, list[str]] = {
        count: [
            name
            for share in Members(to, onward, count).shares
            for name in differing(checkpoint, onward, runs / "onward", share)
        ]
        for count in counts
    }
    size = sum(path.stat().st_size for path in to.glob("*.safetensors"))
    return {"differ": {str(count): len(names) for count, names in differ.items()}, "bytes": size}


async def capped(folder: str, trained: str, steps: int, cap: int) -> dict[str, Any]:
    """Steps on the GPU under a cap of its memory; see `node.capped`."""
    return asdict(trained_under(Path(folder), spec_on_gpu(steps), trained, "cuda:0", cap))


async def main() -> None:
    """Until standard input ends."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    orders: Orders = {"hold": hold, "paces": paces, "payloads": payloads, "logits": logits_of, "resume": resume}
    await obey({**orders, "capped": capped})


if __name__ == "__main__":
    asyncio.run(main())
    end_process()
