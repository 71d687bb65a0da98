"""The lab as a tool: one command on every host of a small internet.

    python -m tests.rig --topology home-home --rate 100mbit/20mbit --rtt 60ms --nat cone,symmetric -- COMMAND

In COMMAND `{name}`, `{address}`, `{public}` and `{seed}` become the host's name, its own address, the address that
the internet sees, and the seed's address.
"""

import argparse
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from atoll_lab.capability import missing
from atoll_lab.lab import Host, Lab
from atoll_lab.namespaces import LabError, end_processes
from atoll_lab.sweep import sweep
from tests.rig.topologies import SEED, path_link, topology

STOPPED = 130
STOPS = (signal.SIGINT, signal.SIGTERM)


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser("python -m tests.rig", description="Run COMMAND on every host of a NAT lab.")
    parser.add_argument(
        "--topology", default="home-home", help="home-home, homes-N (a seed and N homes), public-N"
    )
    parser.add_argument("--nat", default="cone", help="cone, symmetric or noudp; one, or one for each home")
    parser.add_argument("--rate", help="down/up of a home or, in public-N, of every host: 100mbit/20mbit")
    parser.add_argument("--rtt", default="0ms", help="between any two hosts: 60ms")
    parser.add_argument("--jitter", default="0ms", help="between any two hosts, each way, at most: 5ms")
    parser.add_argument("--loss", default="0%", help="between any two hosts, each way: 1%%")
    parser.add_argument("--check", action="store_true", help="only say whether the lab can run here")
    parser.add_argument("--sweep", action="store_true", help="only remove what killed labs left behind")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="{name} {address} {seed}")
    return parser.parse_args(arguments)


def filled(words: Sequence[str], host: Host, seed_address: str) -> list[str]:
    """The command for one host. Other braces stay as they are: commands carry JSON."""
    values = {"name": host.name, "address": host.address, "public": host.public_address, "seed": seed_address}
    for key, value in values.items():
        words = [word.replace(f"{{{key}}}", value) for word in words]
    return list(words)


def copy_lines(host: Host, process: "subprocess.Popen[str]", width: int) -> None:
    """The program's output line by line with the host's name before it, until the program closes it."""
    assert process.stdout is not None
    for line in process.stdout:
        sys.stdout.write(f"{host.name:{width}} | {line.rstrip()}\n")  # in one piece: other threads write too
        sys.stdout.flush()


def run_everywhere(lab: Lab, words: Sequence[str]) -> int:
    """The command on every host; the first exit status that is not 0."""
    width = max(map(len, lab.hosts))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    processes = [host.run(filled(words, host, lab[SEED].address), **pipes) for host in lab]
    readers = [
        threading.Thread(target=copy_lines, args=(host, process, width), daemon=True)
        for host, process in zip(lab, processes, strict=True)
    ]
    # A request to stop waits until all readers run: an interrupt inside `start` would leave one behind.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    for reader in readers:
        reader.start()
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        statuses = [process.wait() for process in processes]
    except KeyboardInterrupt:
        end_processes([host.namespace for host in lab], patience_s=5.0)
        statuses = [STOPPED]
    for reader in readers:
        reader.join(timeout=5)
    return next((status for status in statuses if status), 0)


def sweep_and_tell() -> int:
    """Says what it removed."""
    for name in sweep():
        print(f"removed {name}")
    return 0


def stop(_signal: int, _frame: FrameType | None) -> NoReturn:
    """A request to end is an end in order: what was made is removed."""
    raise KeyboardInterrupt


def lab_run(options: argparse.Namespace, words: Sequence[str]) -> int:
    """Builds the lab, runs the command, removes the lab."""
    link = path_link(options.rate, options.rtt, options.jitter, options.loss)
    spec = topology(options.topology, link, options.nat)
    begin_s = time.monotonic()
    with Lab(spec) as lab:
        print(f"lab of {len(lab.hosts)} hosts built in {time.monotonic() - begin_s:.2f} s", file=sys.stderr)
        return run_everywhere(lab, words)


def main(arguments: Sequence[str]) -> int:
    """Exit status: the command's; 2 when the lab cannot run or was asked for nonsense; 130 when stopped."""
    options = parsed(arguments)
    if (lack := missing()) is not None:
        print(lack, file=sys.stderr)
        return 2
    if options.check or options.sweep:
        return sweep_and_tell() if options.sweep else 0
    words = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not words:
        print("no command: python -m tests.rig --topology home-home -- COMMAND", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, stop)
    try:
        return lab_run(options, words)
    except LabError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return STOPPED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
