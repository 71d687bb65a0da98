"""The GPU's kernels: their bits in Triton's interpreter, and machine code that rounds like the CPU's.

On a machine with a CUDA device the same cases run there.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[4]
KERNELS = {"encode_chunks", "encode_tied"}

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None,
        reason="THE GPU KERNELS WERE NOT TESTED: no triton (pip install -e .[dev] brings it on x86-64 Linux)",
    ),
]


def run(*args, **env):
    """In a process of its own: Triton asks for its mode when it is imported."""
    whole = {**os.environ, **env}
    return subprocess.run([sys.executable, *args], cwd=ROOT, env=whole, capture_output=True, text=True)


@pytest.mark.parametrize("cases", ["any_values", "not any_values"])
def test_the_kernels_give_the_cpus_bits(cases):
    mode = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    file = "tests/node/learning/compress/gpu_cases.py"
    ran = run("-m", "pytest", "-q", "-p", "no:cacheprovider", file, "-k", cases, **mode)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout
    assert "skipped" not in ran.stdout


def test_machine_code_contracts_nothing(tmp_path):
    """Each operation is rounded by itself: no fused multiply-add, subnormals stay, quotients are the nearest."""
    kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.node.learning.compress.gpu_machine_code"],
        cwd=ROOT, env={**kept, "TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    lines = [line.split() for line in ran.stdout.splitlines()]
    assert {name for name, _, _ in lines} == KERNELS
    assert [line for line in lines if line[1] != "0"] == []
    assert all(int(quotients) > 0 for _, _, quotients in lines)
