"""Encoding needs a slab and the payload, not a second copy of the model. Measured in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from atoll.protocols import codec
from tests.node.worker.session_home import SPEC

MODEL = msgspec.structs.replace(
    SPEC.model, dim=512, layers=29, heads=4, kv_heads=4, ffn=680, vocab=4096, context=64
)  # fmt: skip
"""63 million parameters; the sides of its matrices are no multiples of 64."""


def test_an_encode_takes_a_twentieth_of_the_parameters_at_most():
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("this system does not tell the peak of a process")
    spec = codec.encode(msgspec.structs.replace(SPEC, model=MODEL)).hex()
    script = Path(__file__).with_name("encode_memory.py")
    ran = subprocess.run([sys.executable, script, spec, "1"], capture_output=True, text=True, check=True)
    found = json.loads(ran.stdout)
    assert found["parameters"] > 60e6
    middle = found["extra_bytes"][1]
    assert middle <= 0.05 * 4 * found["parameters"], found
