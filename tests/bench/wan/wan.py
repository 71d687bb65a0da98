"""`bench wan`: nodes behind slow links, with and without overlap, beside hivemind's averager on the same links."""

import asyncio
import signal
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.node.runs.presets import model_of, preset
from atoll.protocols.errors import LocalFault
from atoll.protocols.identity import Identity
from atoll_bench.report import Bar, Row, median, row
from atoll_bench.wan.wan_figures import Exchange, Trace, elsewhere, exchanges, goodput
from atoll_bench.wan.wan_nodes import Trained, train
from atoll_bench.wan.wan_rival import Averaged, average
from atoll_lab.capability import missing
from atoll_lab.lab import Host, Lab, LabSpec, LinkSpec, Public
from atoll_lab.sweep import sweep

DOWN_BITS_S, UP_BITS_S, RTT_S = 100e6, 20e6, 0.06
GOODPUT, OF_RIVAL = Bar(">=", 0.96), Bar(">=", 6)
SKIPPED = 3
"""First rounds that are not measured: nodes meet, and windows of connections open."""
PLAIN, OVERLAPPED = "no overlap", "overlap"
COMPRESSIONS = ("float16", "none")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured."""

    nodes: int
    preset: str
    rounds: int
    overlap_steps: int
    turns: int
    compressions: Sequence[str]

    @property
    def rounds_measured(self) -> tuple[int, int]:
        """First round, and the one after the last."""
        return SKIPPED, SKIPPED + self.rounds


def planned(quick: bool, nodes: int, preset_name: str, rounds: int | None, overlap: int | None) -> Plan:
    """The overlap is the preset's own; a slow preset gets few rounds."""
    steps = preset(preset_name, Identity(bytes(32)).peer_id, 1).outer.overlap_bounds[1]
    usual = 2 if quick else 24 if preset_name == "tiny" else 3
    turns = 1 if quick else 8 if preset_name == "tiny" else 3
    shown = COMPRESSIONS[:1] if quick else COMPRESSIONS
    return Plan(nodes, preset_name, rounds or usual, overlap or steps, turns, shown)


async def measure(
    quick: bool, say: Callable[[str], None], *, nodes: int = 4, preset: str = "tiny",
    rounds: int | None = None, overlap: int | None = None,
) -> list[Row]:  # fmt: skip
    """All rows. Raises LocalFault where the lab cannot run, or an arm of ours fails."""
    if (lack := missing()) is not None:
        raise LocalFault(f"NOT MEASURED. {lack}")
    for name in sweep():
        say(f"removed {name}, left by a lab that was killed")
    # To end is to remove what was made: a request to end does what Ctrl-C does.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, signal.raise_signal, signal.SIGINT)
    plan = planned(quick, nodes, preset, rounds, overlap)
    link = LinkSpec(up_bits_s=UP_BITS_S, down_bits_s=DOWN_BITS_S, delay_s=RTT_S / 4)
    with Lab(LabSpec({f"node{number}": Public(link) for number in range(nodes)})) as lab:
        return await arms(list(lab), plan, say)


async def arms(hosts: Sequence[Host], plan: Plan, say: Callable[[str], None]) -> list[Row]:
    """One after the other on the same links, hivemind between our two."""
    values = model_of(plan.preset).parameters
    plain = await trained(hosts, plan, 0, say)
    rivals = {kind: await average(hosts, values, kind, plan.turns, say) for kind in plan.compressions}
    overlapped = await trained(hosts, plan, plan.overlap_steps, say)
    return rows_of(plan, {PLAIN: plain, OVERLAPPED: overlapped}, rivals)


async def trained(hosts: Sequence[Host], plan: Plan, overlap_steps: int, say: Callable[[str], None]) -> Trained:
    """An arm of ours, in homes of its own."""
    first, last = plan.rounds_measured
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        return await train(hosts, Path(folder), plan.preset, first, last, overlap_steps, say)


def rows_of(plan: Plan, ours: dict[str, Trained], rivals: dict[str, Averaged]) -> list[Row]:
    """The figures."""
    rows, times = [], {}
    for name, arm in ours.items():
        times[name] = exchanges(arm.traces, *plan.rounds_measured)
        rows += rows_of_arm(plan, name, arm, times[name])
    for kind, seen in rivals.items():
        rows += rows_of_rival(kind, seen)
    ours_s = median([one.last_s for one in times[PLAIN]])
    return rows + ratios(ours_s, rivals[COMPRESSIONS[0]])


def rows_of_arm(plan: Plan, name: str, arm: Trained, times: Sequence[Exchange]) -> list[Row]:
    """Goodput and exchange of an arm of ours."""
    label, overlaps = f"{plan.nodes} nodes, {plan.preset}, {name}", name == OVERLAPPED
    steps = f"up to {plan.overlap_steps} of H steps; " if overlaps else ""
    note = f"{steps}else {elsewhere(arm.traces, *plan.rounds_measured)} %"
    share = mean_goodput(arm.traces, *plan.rounds_measured)
    own, last = median([one.own_s for one in times]), median([one.last_s for one in times])
    own_note = f"{len(times)} of {plan.nodes * plan.rounds}; waiting for slower nodes is in it"
    return [
        row(f"{label}: goodput", share, "x", GOODPUT if overlaps else None, note=note),
        row(f"{label}: exchange, from a node's own last step", own, "s", note=own_note),
        row(f"{label}: exchange, from the last node's last step", last, "s"),
        row(f"{label}: bytes on a node's link per round", arm.round_bytes / 1e6, "MB"),
    ]


def mean_goodput(traces: Sequence[Trace], first: int, last: int) -> float | None:
    """Over the nodes; None where one's journal lacks a start."""
    shares = [goodput(trace, first, last) for trace in traces]
    known = [share for share in shares if share is not None]
    return statistics.fmean(known) if len(known) == len(shares) else None


def rows_of_rival(kind: str, seen: Averaged) -> list[Row]:
    """hivemind's figures at one compression."""
    label = f"hivemind, {kind}"
    note = f"{seen.failures} steps failed: a peer was lost" if seen.failures else ""
    return [
        row(f"{label}: step(), matchmaking included", median(seen.step_s), "s", note=note),
        row(f"{label}: all-reduce alone", median(seen.exchange_s), "s"),
        row(f"{label}: bytes on a node's link per step", scaled(median(seen.step_bytes)), "MB"),
    ]


def ratios(ours_s: float | None, rival: Averaged) -> list[Row]:
    """hivemind over ours without overlap; judged without hivemind's matchmaking, which can be done beforehand."""
    return [
        row("hivemind step() / our exchange", over(median(rival.step_s), ours_s), "x"),
        row("hivemind all-reduce / our exchange", over(median(rival.exchange_s), ours_s), "x", OF_RIVAL),
    ]


def scaled(size: float | None) -> float | None:
    """Bytes to MB."""
    return None if size is None else size / 1e6


def over(theirs_s: float | None, ours_s: float | None) -> float | None:
    """None where either is missing."""
    return theirs_s / ours_s if theirs_s is not None and ours_s else None
