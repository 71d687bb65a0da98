"""Kernels have no bounds checks. Once with them, in a process of its own, against what a peer might send."""

import os
import subprocess
import sys
from pathlib import Path

from tests.node.learning.compress.honest import honest

ROOT = Path(__file__).parents[4]
CASES = 500
"""Of each of the four attacks: 2,000."""


def test_no_bytes_of_a_peer_lead_outside_an_array(tmp_path_factory):
    """Machine code with checks is kept in a folder of its own, so that nothing else ever runs it."""
    # To compile is nearly all of its time: little is optimized. An index is looked at before that.
    quick = {"NUMBA_OPT": "1", "NUMBA_LOOP_VECTORIZE": "0", "NUMBA_SLP_VECTORIZE": "0"}
    kept = str(tmp_path_factory.mktemp("checked"))
    env = {**os.environ, **quick, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": kept}
    command = [sys.executable, "-m", "tests.node.learning.compress.hostile", str(CASES)]
    errors = tmp_path_factory.mktemp("errors") / "stderr"
    with (
        errors.open("wb") as stderr,
        subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr
        ) as child,
    ):
        stood = list(answered(child))
    assert child.returncode == 0, errors.read_text()[-4000:]
    assert stood == [f"{name} stood" for name in ("bodies", "sections", "scales", "bits")]


def answered(child):
    """Its lines; it is sent the payloads that it asks for."""
    for line in child.stdout:
        asked, *words = line.decode().split()
        if asked == "honest":
            name, k, seed = words
            payload = honest(name, int(k), int(seed))
            child.stdin.write(len(payload).to_bytes(4, "little") + payload)
            child.stdin.flush()
        else:
            yield " ".join((asked, *words))
