"""What a writer of ours says is durable is there after a power loss right after it: on a real file system.

Each writer works on an ext4 in a file, and the file is copied at once (`loop_image`). Fails, and never skips,
where loop mounts cannot be had.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from atoll.node.checkpoint import generations
from atoll.node.checkpoint.disk import write_file
from atoll.p2p.blobs.store import BlobStore
from atoll.p2p.ledger.history import Cut
from atoll.p2p.ledger.store import Ledger
from atoll.p2p.system.atomic_files import read_whole, write_whole
from atoll.p2p.system.key_file import load, store
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Round, digest
from atoll.protocols.ledger.records import Ack
from atoll.protocols.run.run_spec import RunSpec
from tests.chaos.loop_image import in_copy, mounted
from tests.chaos.power_cases import copy_of
from tests.node.worker.session_home import SPEC

torch.set_num_threads(1)
ME = Identity(bytes(31) + b"\1")
RUN: RunSpec = SPEC
DATA = bytes(range(256)) * 400


def commit(disk: Path) -> None:
    ledger = Ledger(disk / "ledger.sqlite", RUN.id)
    for number in range(3):
        ledger.append(ME, Ack(Round(number), digest(b"set"), digest(b"state")))
    # It stays open, as in a node: closing it would write what a commit has not.
    commit.open = ledger


def committed(disk: Path) -> list[str]:
    ledger = Ledger(disk / "ledger.sqlite", RUN.id)
    return [str(entry.seq) for _, entry in ledger.since(0)]


def cut(disk: Path) -> None:
    commit(disk)
    commit.open.cut(Cut(b"summary", last=1))


def left(disk: Path) -> list[str]:
    ledger = Ledger(disk / "ledger.sqlite", RUN.id)
    return [*(str(entry.seq) for _, entry in ledger.since(0)), str(ledger.history.summary)]


def save(disk: Path) -> None:
    for number in (1.0, 2.0):
        generations.begin(disk / "state", {"final": torch.full((1000,), number)}, b"body").finish()


def saved(disk: Path) -> list[str]:
    found = generations.load(disk / "state")
    return [] if found is None else [str(float(found.tensors["final"][0])), *found.report]


def add_blob(disk: Path) -> None:
    BlobStore(disk / "blobs").add_bytes(DATA)


def blobs(disk: Path) -> list[str]:
    found = BlobStore(disk / "blobs")
    return [str(found.is_whole(blob)) for blob in found.blobs()]


def replace(disk: Path) -> None:
    for text in (b"old", b"new"):
        write_whole(disk / "file", text)


def replaced(disk: Path) -> list[str]:
    return [(read_whole(disk / "file", max_bytes=10) or b"none").decode()]


def spool(disk: Path) -> None:
    write_file(disk / "payload", [DATA])


def spooled(disk: Path) -> list[str]:
    path = disk / "payload"
    return [str(path.exists() and path.read_bytes() == DATA)]


def keep_key(disk: Path) -> None:
    store(disk / "identity.key", bytes(31) + b"\1")


def key(disk: Path) -> list[str]:
    return [load(disk / "identity.key").peer_id]


@pytest.mark.parametrize(
    ("write", "read", "expected"),
    [
        pytest.param(commit, committed, ["0", "1", "2"], id="ledger"),
        pytest.param(cut, left, ["2", "b'summary'"], id="cut-ledger"),
        pytest.param(save, saved, ["2.0"], id="generation"),
        pytest.param(add_blob, blobs, ["True"], id="blob"),
        pytest.param(replace, replaced, ["new"], id="whole-file"),
        pytest.param(spool, spooled, ["True"], id="payload"),
        pytest.param(keep_key, key, [ME.peer_id], id="key"),
    ],
)
def test_it_is_there_after_a_power_loss(
    tmp_path, write: Callable[[Path], None], read: Callable[[Path], list[str]], expected: list[str]
):
    with mounted(tmp_path / "disk.img", tmp_path / "disk"):
        write(tmp_path / "disk")
        copy_of(tmp_path / "disk.img", tmp_path / "copy.img")
        assert in_copy(tmp_path / "copy.img", tmp_path / "disk", lambda: read(tmp_path / "disk")) == expected
        if write in (commit, cut):
            commit.open.close()
