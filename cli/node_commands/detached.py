"""`start --detach`: a node that goes on without this terminal, and is reported only once it is up, or failed.

The command starts itself again in a session of its own and waits for the readiness that the node tells a service
manager (node/service/notify.py), or for its end. Until then the node's stderr is shown here.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import IO, Any

import click

from atoll.cli.formatting import print_json
from atoll.node.config.home import Home
from atoll.node.service.notify import SOCKET
from atoll.p2p.system.atomic_files import disk

CRASH_LOG = "crash.log"
"""In the home: what a node that left its terminal writes to stderr, such as the traceback of a bug."""
LOOK_S = 0.1
DATAGRAM_BYTES = 4096


def start_detached(ctx: click.Context, home: Home, *, reads_stdin: bool, as_json: bool) -> None:
    """Start the command of `ctx` again without its terminal. Raises Exit with the node's code if it ends early."""
    from atoll.p2p.transports.p2pd.private_folder import private_folder  # its modules are slow to load

    command = [sys.executable, "-m", "atoll.cli.main", *words_of(ctx), "--detached"]
    with (
        private_folder() as folder,
        tempfile.TemporaryFile() as words,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link,
    ):
        address = str(folder / "ready")
        link.bind(address)
        link.settimeout(LOOK_S)
        # Noted from before the node is there: `timeout 60 atoll start --detach` leaves none that nobody knows.
        told: list[int] = []
        before = signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
        process = subprocess.Popen(
            command,
            stdin=None if reads_stdin else subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=words,
            start_new_session=True,
            env=os.environ | {SOCKET: address},
        )
        is_up = _is_up(process, link, words, told=told)
        signal.signal(signal.SIGTERM, before)
    if not is_up:
        raise click.exceptions.Exit(process.returncode if process.returncode > 0 else 128 - process.returncode)
    process.returncode = 0  # it lives on, and this process ends: no complaint about a child that was left
    if as_json:
        print_json({"pid": process.pid, "home": str(home.root), "log": str(home.log)})
    else:
        click.echo(f"the node is up (pid {process.pid}, log {home.log}); `atoll status`, `atoll stop --wait`")


def leave_terminal(home: Home) -> None:
    """In the node: from now on its stderr is a file of the home, and its log goes to the log file alone."""
    root = logging.getLogger()
    for handler in [one for one in root.handlers if type(one) is logging.StreamHandler]:
        root.removeHandler(handler)
    path = home.root / CRASH_LOG
    with disk(path):
        # A pipe in its place would block the node, and its signals, until somebody reads it.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(path, flags, 0o600)
    # Children inherit it: a pipe or a terminal that a link leads to would refuse what does not fit at once.
    os.set_blocking(descriptor, True)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def words_of(ctx: click.Context) -> list[str]:
    """The command line that gives the parameters of `ctx` again, without `--detach`."""
    assert ctx.info_name is not None
    found = [ctx.info_name]
    for param in ctx.command.params:
        if param.name not in ctx.params:  # an older spelling, whose values another parameter has
            continue
        value = ctx.params[param.name]
        source = ctx.get_parameter_source(param.name)
        given = source is click.core.ParameterSource.COMMANDLINE or (param.multiple and value)
        if isinstance(value, Home):
            found += ["--home", str(value.root)]
        elif given and param.name not in ("detach", "as_json"):
            found += _words(param, value)
    return found


def _words(param: click.Parameter, value: Any) -> Iterator[str]:
    for one in value if param.multiple or isinstance(value, tuple) else (value,):
        if isinstance(param, click.Argument):
            yield one
        elif isinstance(one, bool):
            yield param.opts[0] if one else param.secondary_opts[0]
        else:
            yield from (param.opts[0], str(one))


def _is_up(process: subprocess.Popen[bytes], link: socket.socket, words: IO[bytes], *, told: list[int]) -> bool:
    """Wait until the node is ready, and return True, or has ended. Ctrl-C or a signal in `told` ends it."""
    shown = 0
    try:
        while True:
            if told:
                raise KeyboardInterrupt
            ended = process.poll() is not None
            shown = _show(words, shown)
            if ended:
                return False
            try:
                if link.recv(DATAGRAM_BYTES).startswith(b"READY=1"):
                    return True
            except TimeoutError:
                continue
    except KeyboardInterrupt:
        process.send_signal(signal.SIGTERM)
        process.wait()
        _show(words, shown)
        raise


def _show(words: IO[bytes], shown: int) -> int:
    """Print what the node wrote since byte `shown`; returns where that ends."""
    # The descriptor is the node's too: its place must not move, so nothing is read through it.
    found = os.pread(words.fileno(), 1 << 20, shown)
    sys.stderr.write(found.decode(errors="replace"))
    sys.stderr.flush()
    return shown + len(found)
