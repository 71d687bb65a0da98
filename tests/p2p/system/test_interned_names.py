"""Names of files do not make Python's table of interned strings grow after a node's start."""

import subprocess
import sys

import pytest

LEAST_STEP = 500_000
"""The table of a process with torch or hivemind grows by one or two megabytes at once."""
SCRIPT = """
import sys, tracemalloc
from pathlib import Path
import atoll.p2p.system.interned_names
{modules}
tracemalloc.start()
{settle}
before = tracemalloc.get_traced_memory()[0]
for number in range(40_000):
    str(Path(f"/blobs/{{number:x}}.blob"))
print(tracemalloc.get_traced_memory()[0] - before)
"""
WORKER = """
from atoll.node.worker.imports.lean_torch import lean_imports
with lean_imports():
    import atoll.node.worker.loop
"""
DAEMON = "import atoll.cli.main, atoll.node.daemon.app"


def grown(modules: str, settle: str = "") -> int:
    """Bytes that 40,000 names of files leave in a fresh process."""
    script = SCRIPT.format(modules=modules, settle=settle)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_a_daemons_table_of_names_has_its_size_once_it_is_settled():
    settle = "atoll.p2p.system.interned_names.settle_interned_names()"
    assert grown(DAEMON) > LEAST_STEP, "this Python has no such table: the module can go"
    assert grown(DAEMON, settle) < LEAST_STEP


def test_a_workers_table_of_names_has_its_size_once_torch_is_there():
    assert grown(WORKER) < LEAST_STEP


if sys.version_info >= (3, 12):
    pytestmark = pytest.mark.skip("interned strings live for ever in 3.12 (docs/platforms.md)")
