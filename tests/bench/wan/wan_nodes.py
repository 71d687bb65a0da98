"""The arms of `bench wan` that are atoll: real node processes train on the hosts of a lab."""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from atoll.node.runs.presets import preset
from atoll.p2p.system.atomic_files import write_whole
from atoll.p2p.system.key_file import load_or_create
from atoll.protocols.errors import LocalFault
from atoll.protocols.identity import Identity
from atoll.protocols.run.run_spec import RunSpec, Stage, sign_run
from atoll_bench.wan.wan_figures import Trace
from atoll_lab.lab import Host
from atoll_lab.node import LabNode

POLL_S = 0.2
START_S = 300.0
ROUND_S = 300.0
"""A round that takes longer than this is given up."""
SEED = 1


@dataclass(frozen=True, slots=True)
class Trained:
    """What an arm left: the nodes' journals, and what their links carried in a round."""

    traces: Sequence[Trace]
    round_bytes: float
    """Mean over nodes, both directions, headers and all; pings and leases are in it."""


def spec_of(name: str, owner: Identity, nodes: int, rounds: int, overlap_steps: int) -> RunSpec:
    """The preset's run, at the H of its last stage from the start, for nodes that begin together.

    Its own overlap where `overlap_steps` is the most that it allows; else these steps on every link.
    """
    spec = preset(name, owner.peer_id, SEED, "synthetic:markov")
    stages = (Stage(0, spec.outer.stages[-1].steps),)
    outer = msgspec.structs.replace(spec.outer, rounds=rounds, stages=stages)
    if overlap_steps != outer.overlap_bounds[1]:
        outer = msgspec.structs.replace(outer, overlap_steps=overlap_steps, overlap_most=msgspec.UNSET)
    pace = msgspec.structs.replace(spec.pace, min_members=nodes)
    spec = msgspec.structs.replace(spec, outer=outer, pace=pace)
    spec.check()
    return spec


async def train(
    hosts: Sequence[Host], folder: Path, name: str, first: int, last: int, overlap_steps: int,
    say: Callable[[str], None],
) -> Trained:  # fmt: skip
    """A node on every host trains until all begin the round after `last`: by then the rounds before `last` are
    folded everywhere, also with overlap. Raises LocalFault.
    """
    nodes = [LabNode(host, folder) for host in hosts]
    owners = [load_or_create(node.home.identity) for node in nodes]
    spec = spec_of(name, owners[0], len(nodes), last + 2, overlap_steps)
    run_file = folder / "wan.run"
    write_whole(run_file, sign_run(spec, owners[0]))
    for node, owner in zip(nodes, owners, strict=True):
        node.peer = owner.peer_id
    with ended(nodes):
        for node in nodes:
            node.launch(run_file, seeds=[nodes[0].seed()] if node is not nodes[0] else [])
        await reach(nodes, first, START_S + first * ROUND_S)
        before = carried(hosts)
        await reach(nodes, last, (last - first) * ROUND_S)
        moved = carried(hosts) - before
        await reach(nodes, last + 1, ROUND_S)
        say(f"{len(nodes)} nodes, overlap of {overlap_steps} steps: {last - first} rounds")
    traces = [Trace(node.peer, *journals(node, spec)) for node in nodes]
    return Trained(traces, moved / len(hosts) / (last - first))


@contextlib.contextmanager
def ended(nodes: Sequence[LabNode]) -> Iterator[None]:
    """The nodes end in good order with the block."""
    try:
        yield
    finally:
        for node in nodes:
            node.terminate()
        for node in nodes:
            if node.running:
                node.wait()


async def reach(nodes: Sequence[LabNode], number: int, limit_s: float) -> None:
    """Wait until all nodes work on round `number`. Raises LocalFault when one ends, or none gets there."""
    end_s = time.monotonic() + limit_s
    while any(node.status().get("round", -1) < number for node in nodes):
        for node in nodes:
            if not node.running:
                raise LocalFault(f"{node.host.name} ended: {node.last_words()}")
        if time.monotonic() > end_s:
            stuck = {node.host.name: node.status().get("reason") for node in nodes}
            raise LocalFault(f"no round {number} within {limit_s:.0f} s: {stuck}")
        await asyncio.sleep(POLL_S)


def carried(hosts: Sequence[Host]) -> int:
    """Bytes on all links so far, both directions."""
    return sum(sum(host.link.carried()) for host in hosts)


def journals(node: LabNode, spec: RunSpec) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows and events of a node that has ended."""
    folder = node.home.run(spec.id)
    rows = {row["round"]: row for row in lines(folder / "rounds.jsonl")}
    return list(rows.values()), lines(folder / "events.jsonl")


def lines(path: Path) -> list[dict[str, Any]]:
    """JSON, one value a line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
