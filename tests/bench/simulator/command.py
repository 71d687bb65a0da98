"""`atoll sim --virtual`: plays seeds, prints what the oracle found, and the line that replays each failure."""

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import click

from atoll.cli.formatting import give_report
from atoll_bench.simulator.play import Result, draw, play
from atoll_bench.simulator.traffic import measure_traffic, traffic_lines


def simulate_seeds(
    *,
    seed: int,
    seeds: int,
    nodes: int,
    minutes: float,
    liars: int | None,
    report_file: Path | None,
    as_json: bool = False,
    trainers: int | None = None,
) -> bool:
    """Play `seeds` seeds from `seed` on; whether no promise was broken. `as_json`: the report alone on stdout.

    With `trainers`: one run of real gossip without faults, of whose nodes so many train.
    """
    if trainers is not None:
        traffic = measure_traffic(nodes, min(trainers, nodes), minutes, seed)
        words = "\n".join(traffic_lines(traffic))
        give_report(traffic._asdict(), lambda: click.echo(words), as_json=as_json, report_file=report_file)
        return traffic.finals > 0 and traffic.lost == 0
    results: list[Result] = []
    for result in _played(seed, seeds, nodes, minutes, liars):
        results.append(result)
        for line in _found(result, with_faults=seeds == 1):
            click.echo(line, err=as_json)
        if result.verdict.violations:
            click.echo(f"replay: {replay_line(result.setting.seed, nodes, minutes, liars)}", err=as_json)
    report = _report(results)
    give_report(report, lambda: click.echo(_line(report)), as_json=as_json, report_file=report_file)
    return not report["failed_seeds"]


def _found(result: Result, *, with_faults: bool) -> Iterator[str]:
    """The lines of one seed: its faults if they are wanted, and what is broken."""
    yield from result.faults if with_faults else ()
    for violation in result.verdict.violations:
        yield f"seed {result.setting.seed}: {violation}"


def replay_line(seed: int, nodes: int, minutes: float, liars: int | None) -> str:
    """The command that plays one seed again."""
    more = "" if liars is None else f" --liars {liars}"
    return f"atoll sim --virtual -n {nodes} --minutes {minutes:g} --seed {seed}{more}"


def _played(seed: int, seeds: int, nodes: int, minutes: float, liars: int | None) -> Iterator[Result]:
    settings = [draw(number, nodes, minutes, liars) for number in range(seed, seed + seeds)]
    if seeds == 1:
        yield play(settings[0])
        return
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(play, settings)


def _report(results: list[Result]) -> dict[str, Any]:
    verdicts = [result.verdict for result in results]
    return {
        "seeds": len(results),
        "failed_seeds": [result.setting.seed for result in results if result.verdict.violations],
        "digest": results[0].digest if len(results) == 1 else "",
        "rounds": sum(result.rounds for result in results),
        "finals": sum(verdict.finals for verdict in verdicts),
        "epochs": sum(result.epochs for result in results),
        "undone": sum(verdict.undone for verdict in verdicts),
        "seeds_with_stranded": sum(verdict.stranded > 0 for verdict in verdicts),
        "seeds_owned_by_liars": sum(verdict.owned is not None or verdict.outvoted for verdict in verdicts),
        "still_rounds": {result.setting.seed: round(result.still_rounds, 1) for result in results},
        "seconds": round(sum(result.cpu_s for result in results), 1),
    }


def _line(report: dict[str, Any]) -> str:
    failed = report["failed_seeds"]
    seed, longest = max(report["still_rounds"].items(), key=lambda item: item[1])
    trace = f", trace {report['digest']}" if report["digest"] else ""
    return (
        f"{report['seeds']} seeds, {len(failed)} with a violation; {report['rounds']} rounds begun, "
        f"{report['finals']} final, {report['epochs']} epochs, {report['undone']} final rounds of nodes undone by "
        f"forks; not judged to the end: {report['seeds_with_stranded']} seeds where payloads died, "
        f"{report['seeds_owned_by_liars']} where a third of those left lie; "
        f"longest without a final round after the faults: {longest} round times (seed {seed}); "
        f"{report['seconds']} CPU s{trace}"
    )
