"""`id`: the name that the swarm knows this node by."""

import click

from atoll.cli.formatting import print_json
from atoll.cli.options import home_option, json_option
from atoll.node.config.home import Home
from atoll.p2p.system.key_file import load_or_create


@click.group("id")
def identity() -> None:
    """The node's identity: an Ed25519 key in the home."""


@identity.command()
@home_option
@json_option
def show(home: Home, as_json: bool) -> None:
    """Print the PeerID. The first call makes the key."""
    home.make()
    peer = load_or_create(home.identity).peer_id
    if as_json:
        print_json({"peer": peer, "key": str(home.identity)})
    else:
        click.echo(f"{peer}\nkey file {home.identity}")
