"""Each logger of another project writes what its own reader reads back, from a process like that of a node."""

import importlib.util
import os
import subprocess
import sys
import warnings

import msgspec
import pytest

from atoll.node.config.loggers import check_loggers
from atoll.node.daemon.loggers.child import SINKS
from atoll.node.daemon.loggers.events import LoggedEvent
from atoll.protocols.errors import ConfigError
from tests.waiting import HANGS_S

EVENTS = [
    LoggedEvent(time=1000.0, event="trained", round=4, values={"train_loss": 2.5, "tokens": 640.0}),
    LoggedEvent(time=1001.0, event="trained", round=5, values={"train_loss": 2.25}),
    LoggedEvent(time=1002.0, event="evaluated", round=4, values={"val_bpb": 1.5}),
]
WRITTEN = {
    "trained/train_loss": {4: 2.5, 5: 2.25},
    "trained/tokens": {4: 640.0},
    "evaluated/val_bpb": {4: 1.5},
}
ELSEWHERE = {
    "TRACKIO_SERVER_URL": "http://127.0.0.1:9/?write_token=x", "TRACKIO_SPACE_ID": "a/b", "WANDB_MODE": "online",
    "WANDB_BASE_URL": "http://127.0.0.1:9",
}  # fmt: skip
"""Where a user's other programs may send to."""


def logged(name: str, folder) -> None:
    """Run the logger's process with all events, to its end. Skips, loudly, where its package is missing."""
    if importlib.util.find_spec(name) is None:
        why = f"NOT TESTED: {name} is missing (pip install 'atoll[{name}]')"
        warnings.warn(why, stacklevel=2)
        pytest.skip(why)
    command = [sys.executable, "-m", "atoll.node.daemon.loggers.child", name, str(folder), "tiny"]
    given = b"".join(msgspec.json.encode(event) + b"\n" for event in EVENTS)
    done = subprocess.run(
        command, input=given, capture_output=True, check=False, timeout=HANGS_S, env=os.environ | ELSEWHERE
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == b"." * (1 + len(EVENTS)), "what the package prints is not for the node"


@pytest.mark.filterwarnings("default")
def test_tensorboard_reads_its_files(tmp_path):
    logged("tensorboard", tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert {tag: {one.step: one.value for one in found.Scalars(tag)} for tag in found.Tags()["scalars"]} == WRITTEN
    assert found.Scalars("evaluated/val_bpb")[0].wall_time == 1002.0


READ_TRACKIO = """
import json, sys, trackio
rows = {}
for run in trackio.Api().runs("tiny"):
    for row in __import__("trackio.sqlite_storage").sqlite_storage.SQLiteStorage.get_logs("tiny", run.name):
        for name, value in row.items():
            if "/" in name:
                rows.setdefault(name, {})[row["step"]] = value
print(json.dumps(rows))
"""


@pytest.mark.filterwarnings("default")
def test_trackio_reads_its_project(tmp_path):
    logged("trackio", tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", READ_TRACKIO], capture_output=True, check=True, timeout=HANGS_S,
        env=os.environ | {"TRACKIO_DIR": str(tmp_path)},
    )  # fmt: skip
    found = msgspec.json.decode(done.stdout, type=dict[str, dict[int, float]])
    assert found == WRITTEN


READ_WANDB = """
import json, struct, sys
from wandb.proto import wandb_internal_pb2
data, at, whole, rows = open(sys.argv[1], "rb").read(), 7, b"", {}
while at + 7 <= len(data):
    if 32768 - at % 32768 < 7:
        at += 32768 - at % 32768
    _, size, kind = struct.unpack_from("<IHB", data, at)
    whole, at = whole + data[at + 7 : at + 7 + size], at + 7 + size
    if kind in (1, 4):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(whole)
        found = record.history.item
        items = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in found}
        for name, value in items.items():
            if "/" in name:
                rows.setdefault(name, {})[items["round"]] = value
        whole = b""
print(json.dumps(rows))
"""
"""Its format is LevelDB's log of its own messages. The package's only reader uploads what it reads."""


@pytest.mark.filterwarnings("default")
def test_wandb_reads_its_offline_run(tmp_path):
    logged("wandb", tmp_path)
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    done = subprocess.run(
        [sys.executable, "-c", READ_WANDB, str(path)], capture_output=True, check=True, timeout=HANGS_S
    )
    assert msgspec.json.decode(done.stdout, type=dict[str, dict[int, float]]) == WRITTEN


def test_a_missing_package_is_one_line_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_loggers(("jsonl", "csv"))
    for name in set(SINKS) - {"jsonl", "csv"}:
        with pytest.raises(ConfigError, match=f"loggers: {name} is not installed") as caught:
            check_loggers((name,))
        assert f"pip install 'atoll[{name}]'" in caught.value.line()
    with pytest.raises(ConfigError, match="named twice"):
        check_loggers(("csv", "csv"))
