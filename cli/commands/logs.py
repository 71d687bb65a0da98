"""`logs`: the node's log, also of a node that does not run."""

import click

from atoll.cli.client import ANSWER_S, STREAM_S, NoAnswer, stream
from atoll.cli.formatting import print_json
from atoll.cli.options import home_option, json_option
from atoll.node.config.home import Home
from atoll.node.daemon.telemetry.logfile import LogTail
from atoll.protocols.errors import NotRunning
from atoll.protocols.local.control_messages import MAX_LINES, GetLogs, LogLine, LogLines


@click.command()
@home_option
@json_option
@click.option("-f", "--follow", is_flag=True, help="Go on with new lines until interrupted.")
@click.option("-n", "--tail", default=50, type=click.IntRange(0, MAX_LINES), help="Newest lines to show.")
def logs(home: Home, as_json: bool, follow: bool, tail: int) -> None:
    """The node's log."""
    try:
        wait_s = STREAM_S if follow else ANSWER_S
        for batch in stream(home, GetLogs(tail, follow), LogLines, wait_s=wait_s):
            if not batch.lines and not follow:
                return
            _print(batch.lines, as_json)
    except (NotRunning, NoAnswer):  # who waits in vain for a node is told to look here
        if follow or not home.log.exists():
            raise
        _print(LogTail(home.log).last(tail), as_json)


def _print(lines: tuple[LogLine, ...], as_json: bool) -> None:
    for line in lines:
        if as_json:
            print_json(line)
        else:
            click.echo(f"{line.time[11:23]} {line.level:7} {line.logger.removeprefix('atoll.')}: {line.message}")
