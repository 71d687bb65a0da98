"""`completion`: what a shell needs to complete commands, options and names of runs. click's own scripts."""

import click
from click.shell_completion import ShellComplete, get_completion_class

from atoll.cli.formatting import print_json
from atoll.cli.options import home_option, json_option
from atoll.node.config.home import Home

PROGRAM = "atoll"
VARIABLE = "_ATOLL_COMPLETE"
"""click looks for it in each start of `atoll`; the scripts set it."""
SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@home_option
@json_option
def completion(shell: str, home: Home, as_json: bool) -> None:
    """Print a script for SHELL, to be read at its start (docs/control.md#completion)."""
    text = script(shell)
    if as_json:
        print_json({"shell": shell, "script": text})
    else:
        click.echo(text)


def script(shell: str) -> str:
    """click's script for a shell."""
    kind = get_completion_class(shell)
    assert kind is not None
    # Not the bash class's own `source`: it starts a bash to ask its version, and that bash need not be the user's.
    return ShellComplete.source(kind(click.Command(PROGRAM), {}, PROGRAM, VARIABLE))
