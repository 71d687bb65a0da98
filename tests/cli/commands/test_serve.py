"""`serve` as a process: it says where it is, writes what `generate` writes, and ends by a signal."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager

import pytest

from tests.cli.commands.test_generate import LIKELIEST, run
from tests.later import GROUP, openai
from tests.waiting import HANGS_S

pytestmark = GROUP

__all__ = ["run"]


@contextmanager
def _process(command):
    """Ended also where an assertion fails: Popen alone would wait for a server that nobody ends."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


SLOW = pytest.mark.slow(slice="test_it_writes_what_generate_writes")


@pytest.mark.parametrize("ending", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=SLOW)])
def test_it_writes_what_generate_writes(atoll, tmp_path, run, ending):
    here = json.loads(atoll("generate", "To be", "--json", *LIKELIEST).out)["text"]
    command = [
        sys.executable,
        "-m",
        "atoll.cli.main",
        "--home",
        str(tmp_path / "home"),
        "serve",
        "--port",
        "0",
        "--json",
    ]
    with _process(command) as process:
        said = json.loads(process.stdout.readline())
        assert said["model"] == "tiny"
        with openai.OpenAI(base_url=said["address"], api_key="none", timeout=HANGS_S) as client:
            found = client.completions.create(model="tiny", prompt="To be", max_tokens=8, temperature=0)
            chunks = client.completions.create(
                model="tiny", prompt="To be", max_tokens=8, temperature=0, stream=True
            )
            assert found.choices[0].text == here == "".join(chunk.choices[0].text for chunk in chunks)
        process.send_signal(ending)
        _, errors = process.communicate(timeout=HANGS_S)
    assert process.returncode == (130 if ending == signal.SIGINT else -signal.SIGTERM)
    assert "Traceback" not in errors
    assert errors.startswith("tiny: final round 7, digest ")


def test_a_port_that_is_taken_is_one_line(atoll):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        ran = atoll("serve", "--port", str(port))
    assert (ran.code, ran.err.count("\n")) == (78, 1)
    assert f"port {port} cannot be used: " in ran.err
    assert "choose another --port" in ran.err
