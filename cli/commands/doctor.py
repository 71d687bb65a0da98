"""`doctor`: one screen of checks with pass, warn, fail or skip (not checked), and what to do about each.

The options alone: the checks load half of the node, and `--help` needs none of it.
"""

import click

from atoll.cli.options import home_option, json_option
from atoll.node.config.home import Home
from atoll.protocols.errors import ConfigError


@click.command()
@home_option
@json_option
@click.option("--run", "wanted", metavar="NAME|ID|FILE", help="Measure disk and memory by this run's needs.")
@click.option("--fit", is_flag=True, help="Show which presets this machine can train, and nothing else.")
def doctor(home: Home, as_json: bool, wanted: str | None, fit: bool) -> int:
    """Check this machine, its network and the node: what is wrong, and what to do. Exit 1 if a check fails."""
    if fit and wanted is not None:
        raise ConfigError(
            "--fit is about presets", hint=f"`atoll run show {wanted}` says what that run needs here"
        )
    from atoll.cli.node_commands.doctor_screen import print_checks, print_fit

    return print_fit(home, as_json=as_json) if fit else print_checks(home, wanted, as_json=as_json)
