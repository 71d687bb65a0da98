"""Options that many commands share, and those of `start` about the network."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from atoll.cli.command_group import chosen_home

F = TypeVar("F", bound=Callable[..., Any])

_NETWORK = (
    click.option("--seed", "seeds", multiple=True, metavar="MADDR", help="…/p2p/PEERID of a node to dial first."),
    click.option("--port", type=int, help="Listen here by TCP and QUIC; 0: pick one, and keep it."),
    click.option("--listen", multiple=True, metavar="MADDR", help="Instead of --port: /ip4/0.0.0.0/tcp/4710."),
    click.option("--announce", multiple=True, metavar="MADDR", help="Tell others this, after a port forward."),
    click.option("--port-map/--no-port-map", default=None, help="Ask the router for a port (UPnP, NAT-PMP)."),
    click.option("--transport", type=click.Choice(("p2pd", "pylibp2p")), help="The libp2p to use."),
    click.option("--relay/--no-relay", default=None, help="Relay for nodes that nobody reaches otherwise."),
    click.option("--up", metavar="RATE", help="Cap of what is sent, all protocols together: 20mbit, 2.5MB/s."),
    click.option("--down", metavar="RATE", help="Cap of what is received."),
    click.option("--relay-only/--no-relay-only", default=None, help="Through relays only; hide the address."),
    click.option("--web", metavar="IP:PORT", help="Serve a page and metrics here, to read: 127.0.0.1:0."),
    click.option("--dht/--no-dht", default=None, help="Take part in the DHT; else where it is of use."),
    click.option("--dht-bootstrap", multiple=True, metavar="MADDR", help="…/p2p/PEERID of a node that serves it."),
    click.option("--public/--private", default=None, help="List the run in the DHT; else if everybody may join."),
)


def home_option(command: F) -> F:
    """`--home DIR`, before or after the command's name; the command receives a Home."""
    return click.option("--home", metavar="DIR", callback=chosen_home, help="The node's folder.")(command)


def json_option(command: F) -> F:
    """`--json`: one object, or one object a line for streams; the command receives `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON (docs/json.md).")(command)


def network_options(command: F) -> F:
    """All network options of `start`; the command receives their values by the names of NodeConfig's keys."""
    for option in reversed(_NETWORK):
        command = option(command)
    return command
