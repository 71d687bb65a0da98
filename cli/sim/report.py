"""The report of `atoll sim`: rows and checks, as JSON and as lines for people."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import msgspec

from atoll.cli.formatting import sent_line
from atoll.cli.sim import verdict
from atoll.cli.sim.swarm import Swarm
from atoll.cli.sim.verdict import Rows, by_round, newest_validation, share_of, tokens_used
from atoll.node.daemon.telemetry.round_log import sent_per_round
from atoll.protocols.local.control_messages import RoundStatus, SentPerRound

REPORT_VERSION = 3


def as_json(swarm: Swarm, rows: Rows) -> dict[str, Any]:
    """The whole report, without reference arms; docs/simulation.md has its schema."""
    rounds = by_round(rows)
    newest = newest_validation(rows)
    return {
        "version": REPORT_VERSION,
        "run": {"id": swarm.spec.id.hex(), "name": swarm.spec.name, "parameters": swarm.spec.model.parameters},
        "story": asdict(swarm.story),
        "nodes": {str(number): node.peer for number, node in swarm.nodes.items()},
        "seconds": swarm.seconds,
        "cpu_s": swarm.cpu_s,
        "held_s": swarm.held_s,
        "rounds": rounds,
        "baseline": {},
        "val_bpb": newest.bpb if newest else None,
        "tokens": tokens_used(rows),
        "sent": msgspec.to_builtins(sent(rows, swarm.spec.model.parameters)),
        "goodput": share_of(rows, "steps"),
        "wait_share": share_of(rows, "wait", "transfer"),
        "checks": [asdict(check) for check in promises(swarm, rows, rounds)],
    }


def sent(rows: Rows, parameters: int) -> SentPerRound | None:
    """What a node sent in a round, averaged over all nodes and rounds."""
    flat = [dict(row) for of_node in rows.values() for row in of_node]
    return sent_per_round(msgspec.convert(flat, list[RoundStatus]), 4 * parameters)


def promises(swarm: Swarm, rows: Rows, rounds: list[dict[str, Any]]) -> list[verdict.PromiseCheck]:
    """The promises of every run. None depends on the machine's speed, so a busy machine breaks none."""
    total = swarm.spec.outer.rounds
    flat = [row for of_node in rows.values() for row in of_node]
    payload = max((row["payload_bytes"] for row in flat), default=0)
    checks = [
        verdict.all_folded(rounds, total),
        verdict.all_finished(rows, total),
        verdict.wire_overhead(flat),
        verdict.compression(swarm.spec.model.parameters, payload),
    ]
    for number, at in swarm.seen.started.items():
        checks.append(verdict.returned(rows[0], swarm.nodes[number].peer, at))
    return checks


def print_report(report: Mapping[str, Any], echo: Callable[[str], None]) -> None:
    """Print the report as lines for people, one with `echo` each."""
    goodput = ", ".join(f"{100 * share:.0f} %" for share in report["goodput"].values())
    waits = ", ".join(f"node {node} {100 * share:.0f} %" for node, share in report["wait_share"].items())
    echo(f"{report['run']['name']}: {len(report['rounds'])} rounds in {report['seconds']:.0f} s; waiting: {waits}")
    echo(f"  goodput by node: {goodput}")
    echo(f"  sent: {sent_line(msgspec.convert(report['sent'], SentPerRound | None))}")
    if report["held_s"]:
        echo(f"  the swarm waited {report['held_s']:.0f} s for nodes that loaded")
    for name, arm in report["baseline"].items():
        if "points" in arm:
            bpb, tokens = arm["points"][-1]["val_bpb"], arm["points"][-1]["tokens"]
            share = report["tokens"] / tokens
            echo(f"  reference {name:<8} {bpb:.3f} bits per byte; the swarm used {share:.2f} of its tokens")
    for check in report["checks"]:
        echo(f"  {'ok  ' if check['ok'] else 'FAIL'} {check['name']}: {check['seen']}")
