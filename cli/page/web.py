"""`web`: prints the address of the running node's web page, and opens it."""

import click

from atoll.cli.client import call
from atoll.cli.formatting import print_json, span
from atoll.cli.options import home_option, json_option
from atoll.cli.page.browser import open_page
from atoll.node.config.home import Home
from atoll.protocols.errors import ConfigError, LocalFault
from atoll.protocols.local.control_messages import GetPageToken, GetStatus, PageToken, Status


@click.command()
@home_option
@json_option
@click.option("--no-open", is_flag=True, help="Print the address only.")
def web(home: Home, as_json: bool, no_open: bool) -> None:
    """Open the page of the running node in a browser."""
    url = page_url(call(home, GetStatus(), Status), home)
    given = call(home, GetPageToken(), PageToken)
    steering = _with_token(url, given)
    is_opened = not no_open and open_page(steering)
    if as_json:
        # An address that was opened is used up.
        print_json({"type": "web", "url": url, "opened": is_opened, "steering": "" if is_opened else steering})
        return
    click.echo(url if is_opened else steering)
    if not no_open and not is_opened:
        click.echo("no browser was found here: open the address on this machine", err=True)
    if not is_opened and steering != url:
        within = f"it works once, within {span(given.lasts_s)}"
        click.echo(f"{within}; the page that it opens may pause and limit the node", err=True)


def steering_url(url: str, home: Home) -> str:
    """The address with a one-time token in its fragment, which no browser sends; without where there is none."""
    return _with_token(url, call(home, GetPageToken(), PageToken))


def _with_token(url: str, given: PageToken) -> str:
    return f"{url}#token={given.token}" if given.token else url


def page_url(now: Status, home: Home) -> str:
    """The address of the page. Raises LocalFault or ConfigError with what to do where there is none."""
    if now.web:
        return now.web
    if now.web_trouble:
        raise LocalFault(f"the page is not served: {now.web_trouble}", hint="give `web` another port")
    raise ConfigError(
        "this node serves no page",
        hint=f'`atoll stop --wait`, then `atoll start --open`, or web = "localhost:4780" in {home.config_toml}',
    )
