"""`config list | get | set | unset`: the settings of this node, in `config.toml` of its home."""

import re
from typing import Any

import click

from atoll.cli.formatting import print_json
from atoll.cli.options import home_option, json_option
from atoll.node.config.config_file import is_set, set_key, toml_text, value_in, value_of
from atoll.node.config.config_keys import ConfigKey, config_keys, key_named
from atoll.node.config.home import Home
from atoll.node.config.node_config import checked_values

NEXT_START = "a node that runs reads it at its next start"


def _key_names(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    return [key.name for key in config_keys() if key.name.startswith(incomplete)]


KEY = click.argument("name", metavar="KEY", shell_complete=_key_names)


@click.group()
def config() -> None:
    """The settings of this node, `config.toml` in its home (docs/config.md)."""


@config.command("list")
@home_option
@json_option
def list_keys(home: Home, as_json: bool) -> None:
    """Every key with its value and its meaning, as a file that could be the config.toml."""
    values = checked_values(home.config_toml)
    rows = [_row(key, values) for key in config_keys()]
    if as_json:
        print_json({"path": str(home.config_toml), "keys": rows})
        return
    # Keys of a table stand behind all others, or they would belong to it.
    table = ""
    for row in sorted(rows, key=lambda row: row["key"].rpartition(".")[0]):
        own, _, name = row["key"].rpartition(".")
        if own != table:
            click.echo(f"[{own}]\n")
            table = own
        click.echo("\n".join(_lines(name, row)) + "\n")


@config.command()
@KEY
@home_option
@json_option
def get(name: str, home: Home, as_json: bool) -> None:
    """The value of KEY: that of the file, else the default."""
    row = _row(key_named(name), checked_values(home.config_toml))
    if as_json:
        print_json(row)
    else:
        click.echo(_plain(row["value"]))


class _ValueCommand(click.Command):
    """A number below zero is a value, and no option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put such numbers behind all options, unless the user did: `config set guest.nice -5 --json`."""
        numbers = [] if "--" in args else [arg for arg in args if re.match(r"-\.?\d", arg)]
        rest = [arg for arg in args if arg not in numbers]
        return super().parse_args(ctx, [*rest, "--", *numbers] if numbers else args)


@config.command("set", cls=_ValueCommand)
@KEY
@click.argument("texts", metavar="VALUE...", nargs=-1, required=True)
@home_option
@json_option
def set_value(name: str, texts: tuple[str, ...], home: Home, as_json: bool) -> None:
    """Write KEY into config.toml, whole or not at all; comments stay. Several VALUEs make a list."""
    key = key_named(name)
    _write(home, key, value_of(key, texts), as_json)


@config.command()
@KEY
@home_option
@json_option
def unset(name: str, home: Home, as_json: bool) -> None:
    """Take KEY out of config.toml: its default counts again."""
    _write(home, key_named(name), None, as_json)


def _write(home: Home, key: ConfigKey, value: Any, as_json: bool) -> None:
    set_key(home.config_toml, key, value)
    row = _row(key, checked_values(home.config_toml))
    if as_json:
        print_json(row)
    else:
        click.echo(f"{key.name} = {_shown(row['value'])} in {home.config_toml}; {NEXT_START}")


def _row(key: ConfigKey, values: dict[str, Any]) -> dict[str, Any]:
    """What `--json` shows of a key."""
    return {
        "key": key.name,
        "value": value_in(values, key),
        "default": key.default,
        "set": is_set(values, key),
        "kind": key.kind,
        "meaning": key.meaning,
    }


def _lines(name: str, row: dict[str, Any]) -> list[str]:
    """A key's meaning as a comment, and its line; a comment too where the default counts."""
    meaning = click.wrap_text(row["meaning"], width=100, initial_indent="# ", subsequent_indent="# ")
    if not row["set"]:
        absent = row["default"] is None
        return [meaning, f"# {name} is absent" if absent else f"# {name} = {toml_text(row['default'])}"]
    return [meaning, f"{name} = {toml_text(row['value'])}  # default: {_shown(row['default'])}"]


def _shown(value: Any) -> str:
    return "absent" if value is None else toml_text(value)


def _plain(value: Any) -> str:
    """For scripts: a text without its quotes, a list of texts a line each."""
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return "\n".join(value)
    return value if isinstance(value, str) else _shown(value)
