"""The report of `atoll sim`: rows, checks and the reference arms, as JSON and as a table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from atoll.cli.sim import verdict
from atoll.cli.time_shares import percents
from atoll.protocols.local.control_messages import TimeShares

if TYPE_CHECKING:
    from atoll.cli.sim.command import Swarm

REPORT_VERSION = 2
ADAMW_LIMIT = 1.10
DILOCO_LIMIT = 1.00
AVERAGE_LIMIT = 1.01
"""Plain averaging of what is sent whole, a harder comparison than DiLoCo's Nesterov: 0.989 where all go through,
1.004 where one is killed and one comes late (docs/log). One seed, whose noise is about half a per cent."""
IDLE_LIMIT = 0.02

Rows = Mapping[int, Sequence[Mapping[str, Any]]]


def as_json(swarm: "Swarm", rows: Rows, arms: Mapping[str, Any]) -> dict[str, Any]:
    """The whole report; docs/control.md has its schema."""
    rounds = verdict.by_round(rows)
    checks = promises(swarm, rows, rounds) + baselines(last_bpb(rows), tokens_used(rows), arms)
    if swarm.idle_daemon_cpu is not None:
        share = swarm.idle_daemon_cpu
        checks.append(
            verdict.PromiseCheck("idle daemon CPU", share < IDLE_LIMIT, f"{100 * share:.2f} % of a core per node")
        )
    return {
        "version": REPORT_VERSION,
        "run": {"id": swarm.spec.id.hex(), "name": swarm.spec.name, "parameters": swarm.spec.model.parameters},
        "story": asdict(swarm.story),
        "nodes": {str(number): node.peer for number, node in swarm.nodes.items()},
        "seconds": swarm.seconds,
        "cpu_s": swarm.cpu_s,
        "idle_daemon_cpu": swarm.idle_daemon_cpu,
        "rounds": rounds,
        "baseline": dict(arms),
        "val_bpb": last_bpb(rows),
        "tokens": tokens_used(rows),
        "goodput": share_of(rows, "steps"),
        "wait_share": share_of(rows, "wait", "transfer"),
        "checks": [asdict(check) for check in checks],
    }


def promises(swarm: "Swarm", rows: Rows, rounds: list[dict[str, Any]]) -> list[verdict.PromiseCheck]:
    """What every run must keep."""
    total = swarm.spec.outer.rounds
    flat = [row for of_node in rows.values() for row in of_node]
    payload = max((row["payload_bytes"] for row in flat), default=0)
    checks = [
        verdict.one_digest(rounds, total),
        verdict.all_finished(rows, total),
        verdict.wire_overhead(flat),
        verdict.compression(swarm.spec.model.parameters, payload),
    ]
    for number, at in swarm.returned_at.items():
        checks.append(verdict.returned(rows[0], swarm.nodes[number].peer, at))
    return checks


def baselines(val_bpb: float | None, tokens: int, arms: Mapping[str, Any]) -> list[verdict.PromiseCheck]:
    """Against the reference arms when they had as many tokens as the swarm's final sets."""
    if val_bpb is None or not arms:
        return []
    checks = [verdict.learned(val_bpb, arms["unigram"]["unigram_bpb"])] if "unigram" in arms else []
    for name, limit in (("adamw", ADAMW_LIMIT), ("diloco", DILOCO_LIMIT), ("average", AVERAGE_LIMIT)):
        if name in arms:
            checks.append(verdict.against(name, val_bpb, bpb_at(arms[name]["points"], tokens), limit))
    return checks


def members_of_rounds(rows: Rows, total: int) -> list[int]:
    """Contributors of each round's final set; who was killed is missing in some, who came late in the first."""
    sizes = {
        row["round"]: len(row["contributors"]) for of_node in rows.values() for row in of_node if row["final"]
    }
    return [max(1, sizes.get(number, 0)) for number in range(total)]


def tokens_used(rows: Rows) -> int:
    """Of all contributions that a final set holds: members that were away, or took fewer steps, had fewer."""
    flat = (row for of_node in rows.values() for row in of_node)
    return sum(row["tokens"] for row in flat if row["final"] and row["peer"] in row["contributors"])


def bpb_at(points: Sequence[Mapping[str, Any]], tokens: int) -> float:
    """Validation loss of an arm after so many tokens, on a line between two of its points; at most its last."""
    for before, after in pairwise(points):
        if tokens < after["tokens"]:
            share = max(0.0, (tokens - before["tokens"]) / (after["tokens"] - before["tokens"]))
            return float(before["val_bpb"] + share * (after["val_bpb"] - before["val_bpb"]))
    return float(points[-1]["val_bpb"])


def last_bpb(rows: Rows) -> float | None:
    """Validation loss after the last round (the same on every node; the first that has it)."""
    found = [
        (row["round"], row["val_bpb"])
        for of_node in rows.values()
        for row in of_node
        if row["val_bpb"] is not None
    ]
    return max(found)[1] if found else None


def share_of(rows: Rows, *names: str) -> dict[str, float]:
    """Per node: the share of these in all the time of its rounds; its newest one also has the time after it."""
    shares = {}
    for number, of_node in rows.items():
        over = sorted(of_node, key=lambda row: row["round"])[:-1]
        whole = {name: sum(row[name] for row in over) for name in TimeShares.__struct_fields__}
        percent = percents(whole)
        shares[str(number)] = sum(percent[name] for name in names) / 100 if percent else 0.0
    return shares


def print_report(report: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """The report for people."""
    say("")
    goodput = ", ".join(f"{100 * share:.0f} %" for share in report["goodput"].values())
    waits = ", ".join(f"node {node} {100 * share:.0f} %" for node, share in report["wait_share"].items())
    say(f"{report['run']['name']}: {len(report['rounds'])} rounds in {report['seconds']:.0f} s; waiting: {waits}")
    say(f"  goodput by node: {goodput}")
    for name, arm in report["baseline"].items():
        if "points" in arm:
            bpb, tokens = arm["points"][-1]["val_bpb"], arm["points"][-1]["tokens"]
            share = report["tokens"] / tokens
            say(f"  reference {name:<8} {bpb:.3f} bits per byte; the swarm used {share:.2f} of its tokens")
    for check in report["checks"]:
        say(f"  {'ok  ' if check['ok'] else 'FAIL'} {check['name']}: {check['seen']}")
