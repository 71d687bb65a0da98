"""`start` refuses what cannot work, in one line, before anything runs."""

import json
import shutil

import pytest

from atoll.node.home import Home, hold_lock

MARKOV = ("--data", "synthetic:markov", "--seed", "1")


@pytest.fixture
def run_id(atoll) -> str:
    return json.loads(atoll("run", "new", "tiny", *MARKOV, "--json").out)["run"]


def refused(ran, code: int, *said: str) -> None:
    assert ran.code == code
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1
    for words in said:
        assert words in ran.err


def test_without_a_run(atoll):
    refused(atoll("start"), 78, "there is no run in this home; make one with `atoll run new NAME`")
    refused(atoll("start", "--run", "nope.run"), 78, "there is no run file nope.run")


def test_unknown_key_in_the_config(atoll, run_id, tmp_path):
    (tmp_path / "home/config.toml").write_text('lisen = "/ip4/127.0.0.1/tcp/1"\n')
    refused(atoll("start"), 78, "config.toml: unknown key lisen; did you mean listen?")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--listen", "127.0.0.1:4710"], "is not a multiaddr; for example"),
        (["--seed", "/ip4/127.0.0.1/tcp/1"], "does not end in /p2p/PEERID"),
        (["--device", "tpu"], "device 'tpu' is not one of auto, cpu, cuda"),
        (["--threads", "-1"], "threads = -1 is outside"),
    ],
)
def test_flags_that_cannot_work(atoll, run_id, flags, said):
    refused(atoll("start", *flags), 78, said)


def test_a_second_daemon_in_one_home(atoll, run_id, tmp_path):
    with hold_lock(Home(tmp_path / "home")):
        refused(atoll("start"), 78, "a node already runs in", "(pid ", "another --home")


def test_another_run_of_the_same_name(atoll, run_id, tmp_path):
    shutil.move(tmp_path / "home/runs/tiny.run", tmp_path / "first.run")
    atoll("run", "new", "tiny", "--data", "synthetic:markov", "--seed", "2")
    refused(atoll("start", "--run", str(tmp_path / "first.run")), 78, "another run is called 'tiny' here; move ")
