"""A worker begins before the daemon is loaded, if it is clear in which run it works; what a daemon loads."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from atoll.cli.node_commands.early_worker import begin_early
from atoll.node.config.home import Home
from atoll.node.config.node_config import NodeConfig
from atoll.node.ipc.worker_pipe import WORKER_LOG
from atoll.p2p.system.atomic_files import make_folder


class Begun:
    """Notes what begins."""

    def __init__(self) -> None:
        self.logs: list[Path] = []

    async def begin(self, log_path, nice, free) -> None:
        assert (nice, free.memory_bytes > 0) == (3, True)
        self.logs.append(log_path)


@pytest.mark.parametrize("runs", [0, 1, 2])
@pytest.mark.parametrize("roles", [(), ("train", "relay"), ("relay",)])
async def test_a_worker_begins_early_where_there_is_one_run_and_a_model(tmp_path, runs, roles):
    home, begun = Home(tmp_path), Begun()
    for number in range(runs):
        (make_folder(home.run(bytes([number]) * 32)) / WORKER_LOG).touch()
    make_folder(home.run(b"x" * 32))  # a run in which no worker began yet
    config = NodeConfig(roles=roles, device="cpu", guest=SimpleNamespace(nice=3, gpu_memory=0))
    await begin_early(home, config, begun)
    is_early = runs == 1 and roles != ("relay",)
    assert begun.logs == [home.run(bytes(32)) / WORKER_LOG] * is_early


def test_a_starting_daemon_imports_nothing_that_most_nodes_never_use():
    """A live panel, metrics and circuits through relays: each takes a few hundredths of a second to import."""
    late = {"OpenSSL", "cryptography.x509", "prometheus_client", "rich"}
    script = f"""
import sys
from types import SimpleNamespace
import atoll.cli.commands.start, atoll.cli.node_commands.running
from atoll.node.daemon.web.site import Site
from atoll.p2p.nat.circuit import prover
from atoll.protocols.identity import Identity
Site(SimpleNamespace()), prover(Identity(bytes(32)))
print(sorted({late!r} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
