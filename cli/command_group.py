"""Finds the command, and turns every failure into one line and an exit code (docs/control.md)."""

import errno
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from atoll.cli.command_table import COMMANDS, MOVED, NOUNS, SECTIONS, SHOWN, extension
from atoll.p2p.system.garbage import uncollected_imports
from atoll.protocols.errors import AtollError, LocalFault

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from atoll.node.config.home import Home

INTERRUPTED = 130
READER_GONE = 128 + signal.SIGPIPE
"""As a shell shows the end of what it runs under `| head`."""
_FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO


def load(name: str) -> click.Command:
    """Import a command of the table, or a verb of one: `run exclude`. Raises ConfigError if there is none."""
    first, _, verb = name.partition(" ")
    place = COMMANDS[first][0]
    if ":" not in place:
        place = extension(place, first, f"`atoll {first}`")
    module, _, attribute = place.partition(":")
    with uncollected_imports():
        command: click.Command = getattr(importlib.import_module(module), attribute)
    return command.commands[verb] if verb and isinstance(command, click.Group) else command


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of the table, without older spellings."""
        return SHOWN

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import what the table names. Raises ConfigError for a command that is not installed."""
        return load(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table's lines, so that help imports no command."""
        for title, names in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, COMMANDS[name][1]) for name in names])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list["CompletionItem"]:
        """Names of the table and the options, so that a Tab imports no command."""
        from click.shell_completion import CompletionItem

        named = [(name, COMMANDS[name][1]) for name in SHOWN if name.startswith(incomplete)]
        found = [CompletionItem(name, help=line) for name, line in named]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Suggest the likely spelling of a command that does not exist."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib

            whole = {verb: f"{noun} {verb}" for noun, verbs in NOUNS.items() for verb in verbs}
            known = whole | {name: MOVED.get(name, name) for name in COMMANDS}
            close = difflib.get_close_matches(args[0], known, n=1)
            hint = f" Did you mean {known[close[0]]}?" if close else ""
            raise click.UsageError(f"No such command {args[0]!r}.{hint}", ctx)
        if args and args[0] in MOVED and for_people():  # scripts are told nothing: the old spelling stays
            click.echo(f"hint: this is now `atoll {MOVED[args[0]]}`", err=True)
        return super().resolve_command(ctx, args)


class GroupedCommand(click.Command):
    """A command with many options: `--help` has those of every day, `--help-all` all of them in groups."""

    def __init__(self, *args: Any, groups: dict[str, Sequence[str]], **more: Any) -> None:
        super().__init__(*args, **more)
        self._groups = groups
        """Title -> names of the parameters; the others are the options of every day."""
        self.params.append(
            click.Option(
                ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_print_all,
                help="Show all options, in groups.",
            )
        )  # fmt: skip

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of every day, and the groups where `--help-all` asks for them."""
        rare = {name for names in self._groups.values() for name in names}
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        titles = {"Options": [option.name for option in options if option.name not in rare], **self._groups}
        for title, names in titles.items():
            found = [option.get_help_record(ctx) for option in options if option.name in names]
            rows = [row for row in found if row is not None]
            if rows and (title == "Options" or ctx.meta.get(_ALL)):
                with formatter.section(title):
                    formatter.write_dl(rows)


_ALL = "help-all"


def _print_all(ctx: click.Context, _param: click.Parameter, is_wanted: bool) -> None:
    if is_wanted and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


def for_people() -> bool:
    """Whether a person reads stderr: scripts get no hints."""
    return sys.stderr.isatty()


def renamed(
    old: str, to: str, name: str
) -> tuple[Callable[..., Any], Callable[[click.Context, click.Parameter, Any], Any]]:
    """A hidden option for an older spelling of a `multiple` one, and the callback by which the new one adds it."""

    def old_values(ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> None:
        ctx.meta[name] = values
        if values and for_people():  # scripts are told nothing: the old spelling stays
            click.echo(f"hint: {old} is now {to}", err=True)

    def both(ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
        return (*values, *ctx.meta.get(name, ()))

    hidden = click.option(
        old, f"old_{name}", multiple=True, hidden=True, is_eager=True, expose_value=False, callback=old_values
    )
    return hidden, both


def chosen_home(ctx: click.Context, _param: click.Parameter, value: str | None) -> "Home":
    """The home that `--home` names, before or after the command."""
    from atoll.node.config.home import home_at

    return home_at(value or ctx.find_root().obj)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--home", metavar="DIR", help="The node's folder (else $ATOLL_HOME, or your data folder).")
@click.version_option(package_name="atoll", message="atoll %(version)s", help="Print it.")
@click.pass_context
def cli(ctx: click.Context, home: str | None) -> None:
    """Train one language model together: a peer-to-peer node, no coordinator."""
    ctx.obj = home
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL and ctx.invoked_subcommand != "start":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # all is loaded; `start` has StopSignals


def run(argv: Sequence[str] | None = None, *, name: str = "atoll") -> int:
    """Run one command; the exit code is the answer. Bugs keep their traceback."""
    try:
        result = cli.main(args=None if argv is None else list(argv), prog_name=name, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except SystemExit as end:  # 1 is click's where nobody reads the output any more; a signal has its own
        return READER_GONE if end.code == 1 else int(end.code or 0)
    except AtollError as error:
        click.echo(f"error: {error.line()}", err=True)
        return error.exit_code
    except OSError as error:
        if isinstance(error, PermissionError) and error.filename:  # another user's home, looked at by its paths
            click.echo(f"error: {error.filename}: {error.strerror}; check who owns it", err=True)
            return LocalFault.exit_code
        # A fault of any other file is a DiskFault by now: what is left is the output.
        if error.errno not in _FULL or error.filename is not None:
            raise
        drop_output()
        click.echo(f"error: cannot write the output: {error.strerror}", err=True)
        return LocalFault.exit_code
    return result if isinstance(result, int) else 0


def drop_output() -> None:
    """Let what stdout did not take go, and all that follows; else the interpreter tries, and fails, at its end."""
    with suppress(OSError, ValueError):  # a test's stdout is no file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
