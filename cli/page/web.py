"""`web`: prints the address of the running node's web page, and opens it."""

import click

from atoll.cli.client import call
from atoll.cli.formatting import print_json
from atoll.cli.options import home_option, json_option
from atoll.cli.page.browser import open_page
from atoll.node.config.home import Home
from atoll.protocols.errors import ConfigError, LocalFault
from atoll.protocols.local.control_messages import GetStatus, Status


@click.command()
@home_option
@json_option
@click.option("--no-open", is_flag=True, help="Print the address only.")
def web(home: Home, as_json: bool, no_open: bool) -> None:
    """Open the page of the running node in a browser."""
    url = page_url(call(home, GetStatus(), Status), home)
    is_opened = not no_open and open_page(url)
    if as_json:
        print_json({"type": "web", "url": url, "opened": is_opened})
        return
    click.echo(url)
    if not no_open and not is_opened:
        click.echo("no browser was found here: open the address on this machine", err=True)


def page_url(now: Status, home: Home) -> str:
    """The address of the page. Raises LocalFault or ConfigError with what to do where there is none."""
    if now.web:
        return now.web
    if now.web_trouble:
        raise LocalFault(f"the page is not served: {now.web_trouble}", hint="give `web` another port")
    raise ConfigError(
        "this node serves no page",
        hint=f'start it with `atoll start --open`, or put web = "localhost:4780" into {home.config_toml}',
    )
