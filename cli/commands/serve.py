"""`serve`: a model by OpenAI's API on loopback, for programs that speak it."""

import socket
from pathlib import Path
from typing import Any

import click

from atoll.cli.formatting import print_json
from atoll.cli.model_source import SOURCE, open_model
from atoll.cli.options import json_option
from atoll.node.config.home import Home
from atoll.protocols.errors import ConfigError

PORT = 8080


def _with_source(command: Any) -> Any:
    for option in reversed(SOURCE):
        command = option(command)
    return command


@click.command()
@_with_source
@click.option(
    "--port", type=click.IntRange(0, 65535), default=PORT, show_default=True, help="On 127.0.0.1; 0: pick one."
)
@json_option
def serve(
    home: Home,
    wanted: str | None,
    average: bool,
    folder: Path | None,
    data: str | None,
    device: str,
    port: int,
    as_json: bool,
) -> None:
    """Serve a model by OpenAI's API on this machine, until Ctrl-C. No node needs to run.

    Its weights are those of the start; begin again for newer ones.
    """
    with _listener(port) as listener:
        model = open_model(home, wanted, average=average, folder=folder, data=data, device=device)
        try:
            from atoll.node.serving.app import server_of
        except ModuleNotFoundError as error:
            if error.name not in ("starlette", "uvicorn"):
                raise
            hint = "pip install 'atoll[serve]'"
            raise ConfigError("a server needs the packages starlette and uvicorn", hint=hint) from error
        name = folder.absolute().name if folder else model.about.partition(":")[0]
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        if as_json:
            print_json({"address": address, "model": name})
        else:
            click.echo(f"{address}  model {name}; Ctrl-C ends")
        server_of(model, name).run(sockets=[listener])


def _listener(port: int) -> socket.socket:
    """A bound socket; others may connect from now on. Raises ConfigError."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"port {port} cannot be used: {error.strerror}", hint="choose another --port") from error
    return listener
