"""Where a worker encodes: what is chosen, with a line in the log; and whole sessions in Triton's interpreter.

On a machine with a CUDA device the same sessions run there (exchange_cases.py).
"""

import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from atoll.node.learning.compress.codecs import OnHost
from atoll.node.runs.capacity.memory_model import encoder_bytes, memory_shortage
from atoll.node.worker.encoding.encoder_choice import encoder_for
from atoll.protocols import codec
from atoll.protocols.local.worker_messages import StartRequest
from atoll.protocols.run.arena import arena_of
from tests.node.worker.session_home import ME, SPEC, Home

ROOT = Path(__file__).parents[4]
TRITON = importlib.util.find_spec("triton") is not None


@pytest.fixture(autouse=True)
def log_level(caplog):
    caplog.set_level(logging.INFO)


def start(exchange_on, device="cpu", **others):
    return StartRequest(codec.encode(SPEC), ME, "", "", 3, device, exchange_on=exchange_on, **others)


@pytest.mark.parametrize("exchange_on", ["auto", "host"])
def test_without_a_gpu_nothing_is_tried_and_nothing_is_said(exchange_on, caplog):
    encoder = encoder_for(SPEC, start(exchange_on))
    assert isinstance(encoder, OnHost)
    assert (encoder.threads, encoder.device.type, caplog.text) == (3, "cpu", "")


def test_a_gpu_is_not_tried_where_the_node_said_host(caplog):
    assert isinstance(encoder_for(SPEC, start("host", "cuda:9")), OnHost)
    assert caplog.text == ""


def test_parts_of_weights_are_encoded_on_the_host(caplog):
    assert isinstance(encoder_for(SPEC, start("device", "cuda:0,cuda:1", shard=True)), OnHost)
    line = (
        "contributions are encoded on the host, not on cuda:0: with shard the trained values come together there"
    )
    assert caplog.messages == [line]


def test_a_device_whose_kernels_do_not_run_is_a_line_and_the_session_goes_on(tmp_path, caplog):
    """Triton cannot run on CPU tensors, wherever this is."""
    node = Home(tmp_path, exchange_on="device")
    (line,) = caplog.messages
    why = "its kernels do not run: " if TRITON else "its kernels cannot be loaded: "
    assert line.startswith(f"contributions are encoded on the host, not on cpu: {why}")
    assert node.train(0).payload_bytes > 0


def test_a_codec_without_kernels_is_a_line(caplog):
    if not TRITON:
        return
    spec = msgspec.structs.replace(SPEC, compress=type(SPEC.compress)(codec="int8", k=4096, feedback=0.95))
    assert isinstance(encoder_for(spec, start("device")), OnHost)
    assert caplog.messages[-1].endswith("there are no kernels for int8 with k = 4096")


def test_auto_wants_twice_the_room_that_encoding_and_training_take():
    own = encoder_bytes(SPEC)
    assert own > 8 * 4096 * arena_of(SPEC.model).chunks
    whole = own + 16 * SPEC.model.parameters
    assert memory_shortage(SPEC, own, spare=False) == ""
    assert "are wanted for that" in memory_shortage(SPEC, own - 1, spare=False)
    assert memory_shortage(SPEC, 2 * whole, spare=True) == ""
    assert "are wanted for that" in memory_shortage(SPEC, 2 * whole - 1, spare=True)


@pytest.mark.slow(slice="tests/node/learning/compress/test_gpu.py::test_the_kernels_give_the_cpus_bits")
@pytest.mark.skipif(
    not TRITON,
    reason="SESSIONS ON A GPU WERE NOT TESTED: no triton (pip install -e .[dev] brings it on x86-64 Linux)",
)
def test_sessions_that_encode_on_the_device():
    """In a process of its own: Triton asks for its mode when it is imported."""
    mode = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/node/worker/exchange_cases.py"],
        cwd=ROOT, env={**os.environ, **mode}, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout
    assert "skipped" not in ran.stdout
