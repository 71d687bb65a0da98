"""Kernels have no bounds checks. Once with them, in a process of its own, against what a peer might send."""

import os
import subprocess
import sys
from pathlib import Path

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
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert ran.stdout.split() == [
        word for name in ("bodies", "sections", "scales", "bits") for word in (name, "stood")
    ]
