"""`node`, `peer`, `model`: nouns whose verbs are commands that live elsewhere, loaded when they are called."""

import click

from atoll.cli.command_group import load
from atoll.cli.command_table import COMMANDS, NOUNS


class Noun(click.Group):
    """A group whose verbs are those of NOUNS."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of the table."""
        return list(NOUNS[str(self.name)])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command that a verb names."""
        place = NOUNS[str(self.name)].get(cmd_name)
        return None if place is None else load(place)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The lines of COMMANDS, so that help imports no command that is listed there."""
        with formatter.section("Commands"):
            formatter.write_dl([(verb, self._line(verb, place)) for verb, place in NOUNS[str(self.name)].items()])

    def _line(self, verb: str, place: str) -> str:
        return COMMANDS[place][1] if place in COMMANDS else load(place).get_short_help_str()


@click.group(cls=Noun)
def node() -> None:
    """The node of this home. The daily verbs need no noun: `atoll start`."""


@click.group(cls=Noun)
def peer() -> None:
    """Other nodes, as this one sees them."""


@click.group(cls=Noun)
def model() -> None:
    """The weights of a run, as this home has them."""
