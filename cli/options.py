"""Options that many commands share."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from atoll.node.config.home import Home, home_at

F = TypeVar("F", bound=Callable[..., Any])


def _home(ctx: click.Context, _param: click.Parameter, value: str | None) -> Home:
    return home_at(value or ctx.find_root().obj)


def home_option(command: F) -> F:
    """`--home DIR`, before or after the command's name; the command receives a Home."""
    return click.option("--home", metavar="DIR", callback=_home, help="The node's folder.")(command)


def json_option(command: F) -> F:
    """`--json`: one object, or one object a line for streams; the command receives `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON (docs/json.md).")(command)
