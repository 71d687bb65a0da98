"""`top`: a full-screen view of the running node, with keys. The screen's package is an extra."""

import sys

import click

from atoll.cli.formatting import print_json
from atoll.cli.options import home_option, json_option
from atoll.cli.top.reading import read_node
from atoll.node.config.home import Home
from atoll.protocols.errors import ConfigError


@click.command()
@home_option
@json_option
@click.option(
    "--every", default=1.0, type=click.FloatRange(0.2, 60), show_default=True, help="Seconds to the next."
)
def top(home: Home, as_json: bool, every: float) -> None:
    """A full screen of the running node: charts, peers, rounds, log.

    Keys: p pause, r resume, Tab the next page, q quit. The node runs on.
    """
    first = read_node(home)
    if as_json:
        print_json(first)
        return
    if not _is_terminal():
        raise ConfigError("`atoll top` needs a terminal", hint="use `atoll status --watch`, or `atoll top --json`")
    try:
        from atoll.cli.top.screen import NodeScreen
    except ModuleNotFoundError as error:
        if error.name != "textual":
            raise
        raise ConfigError("`atoll top` needs the package textual", hint="pip install 'atoll[top]'") from error
    NodeScreen(home, first, every_s=every).run()


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()
