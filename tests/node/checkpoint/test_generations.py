"""Local state: whole or not at all, through kill -9, full disks and flipped bits."""

import errno
import json
import os
import subprocess
import sys

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from atoll.node.checkpoint import generations, manifests
from atoll.node.checkpoint.disk import write_file
from atoll.node.checkpoint.local import FirstBody, LocalBody, begin_local, load_local
from atoll.node.checkpoint.parts import hash_with_parts
from atoll.protocols import codec
from atoll.protocols.errors import CorruptFault, DiskFault
from atoll.protocols.ids import Digest, Round, RunId, digest
from atoll.protocols.local.worker_messages import Pending
from tests.disk_order import DiskOrder

RUN = RunId(b"r" * 32)
PENDING = Pending(Round(4), Digest(b"b" * 32), Digest(b"p" * 32), "/x", 5, 4096, 64, 2.5)
BODY = LocalBody(RUN, 3, Digest(b"s" * 32), 20, (PENDING,))


def tensors(value=1.0):
    return {
        "theta": torch.full((3, 4096), int(value), dtype=torch.int32),
        "residual": torch.full((3, 4096), value),
        "adam.m": torch.full((7,), value, dtype=torch.bfloat16),
        "adam.step": torch.tensor(int(value)),
        "nothing": torch.empty((0, 4)),
    }


def arrays(folder, value):
    """A tensor that is a file already, as the states of a fold are."""
    values = torch.full((2, 4096), value, dtype=torch.int32)
    path = folder.with_name(f"array-{value}")
    path.write_bytes(values.numpy().tobytes())
    return {"final": generations.SavedArray(values, path, b"head", digest(b"head", path.read_bytes()))}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def value_of(folder):
    loaded = generations.load(folder)
    return loaded and float(loaded.tensors["residual"][0, 0])


def test_round_trip(tmp_path):
    assert load_local(tmp_path / "state", RUN) is None
    begin_local(tmp_path / "state", BODY, tensors()).finish()
    again = load_local(tmp_path / "state", RUN)
    assert again is not None
    assert (again.body, again.report) == (BODY, ())
    assert again.tensors.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert again.tensors[name].dtype == tensor.dtype
        assert torch.equal(again.tensors[name], tensor)


def test_a_generation_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    order, state = DiskOrder(monkeypatch), tmp_path / "state"
    for number in range(3):
        more = arrays(state, number)
        begin_local(state, BODY, tensors(float(number)), steady=("theta",), arrays=more).finish()
    order.check("0000000001", "0000000002", "0000000003")


def test_a_file_of_the_worker_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    order = DiskOrder(monkeypatch)
    write_file(tmp_path / "round.payload", [b"one", b"two"])
    order.check("round.payload")


def test_strided_tensors_are_saved_by_value(tmp_path):
    grid = torch.arange(12.0).view(3, 4).t()
    generations.begin(tmp_path, {"grid": grid}, b"").finish()
    assert torch.equal(generations.load(tmp_path).tensors["grid"], grid)


def test_large_tensors_are_fetched_in_parts(tmp_path, monkeypatch):
    whole = generations_of(tmp_path / "whole")
    monkeypatch.setattr(generations, "_FETCHED", 5)
    assert generations_of(tmp_path / "parts") == whole


def generations_of(folder):
    """The bytes of one, of tensors of every dimension."""
    saved = {
        "a": torch.randn(7, 5, generator=torch.Generator().manual_seed(1)).t(),
        "b": torch.zeros(0),
        "c": torch.ones(()),
    }
    generations.begin(folder, saved, b"").finish()
    loaded = generations.load(folder)
    assert all(torch.equal(loaded.tensors[name], value) for name, value in saved.items())
    return (folder / "0000000001" / "tensors.safetensors").read_bytes()


def test_zeros_take_nothing_of_the_disk_and_are_read_as_zeros(tmp_path):
    """Error feedback of experts that are not trained here: holes at the start, inside, and at the end."""
    sparse = torch.zeros((256, 4096))
    sparse[40:44], sparse[100, 7], sparse[200, -1] = 1.0, 2.0, -0.0
    saved = {"residual": sparse, "nothing": torch.zeros((64, 4096), dtype=torch.int32)}
    generations.begin(tmp_path, saved, b"", steady={"nothing"}).finish()
    status = (tmp_path / "0000000001" / "tensors.safetensors").stat()
    assert status.st_size > 5 << 20
    assert status.st_blocks * 512 < 1 << 20
    loaded = generations.load(tmp_path).tensors
    assert all(loaded[name].numpy().tobytes() == value.numpy().tobytes() for name, value in saved.items())


def test_what_may_change_is_saved_as_it_was_and_what_is_steady_with_the_rest(tmp_path):
    before = tensors(1)
    generations.begin(tmp_path / "plain", before, b"words").finish()
    changing = {name: tensor.clone() for name, tensor in before.items()}
    unfinished = generations.begin(tmp_path / "later", changing, b"words", steady={"residual", "nothing"})
    for name in changing.keys() - {"residual", "nothing"}:
        changing[name].zero_()
    unfinished.finish()
    plain, later = (tmp_path / name / "0000000001" for name in ("plain", "later"))
    assert names(plain) == names(later)
    assert all((plain / name).read_bytes() == (later / name).read_bytes() for name in names(plain))
    assert value_of(tmp_path / "later") == 1


def test_the_last_two_are_kept_and_leftovers_swept(tmp_path):
    for value in range(5):
        (tmp_path / "0000000009.part").mkdir(exist_ok=True)
        generations.begin(tmp_path, tensors(value), b"").finish()
    assert names(tmp_path) == ["0000000004", "0000000005"]
    assert value_of(tmp_path) == 4


def test_an_array_that_is_a_file_is_not_written_again(tmp_path):
    state = tmp_path / "state"
    given = arrays(state, 7)
    generations.begin(state, tensors(), b"body", arrays=given).finish()
    own = state / "0000000001" / "final.array"
    assert own.stat().st_ino == given["final"].path.stat().st_ino
    given["final"].path.unlink()
    loaded = generations.load(state)
    assert torch.equal(loaded.tensors["final"], given["final"].values)
    assert loaded.arrays == {"final": own}
    loaded.tensors["final"].zero_()  # of a private copy
    assert torch.equal(generations.load(state).tensors["final"], given["final"].values)


def test_a_file_system_without_hard_links_gets_a_copy(tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    given = arrays(tmp_path / "state", 7)
    generations.begin(tmp_path / "state", {}, b"", arrays=given).finish()
    own = tmp_path / "state" / "0000000001" / "final.array"
    assert own.stat().st_ino != given["final"].path.stat().st_ino
    assert torch.equal(generations.load(tmp_path / "state").tensors["final"], given["final"].values)


def write_parts(folder):
    folder.mkdir()
    save_file({"exp_avg/a": torch.ones(4)}, folder / "shard-00001-model-00001-of-00001.safetensors")


@pytest.mark.parametrize("number", [1, 2])
def test_a_generation_of_an_older_version_is_read(tmp_path, number):
    """Format 1 has no arrays, and both hash the parts with the tensors."""
    state = tmp_path / "state"
    begin_local(state, BODY, tensors(), arrays=arrays(state, 7) if number == 2 else {}).finish()
    newest = state / "0000000001"
    write_parts(newest / "parts")
    found = manifests.manifest_of((newest / "manifest").read_bytes())
    fields = (number, found.rows, hash_with_parts(found.tensors, newest / "parts"), found.body, found.arrays)
    kinds = {1: manifests.FirstManifest, 2: manifests.SecondManifest}
    body = codec.encode(kinds[number](*fields[: 3 + number]))
    (newest / "manifest").write_bytes(digest(body) + body)
    loaded = load_local(state, RUN)
    assert (loaded.body, loaded.report, list(loaded.arrays)) == (BODY, (), ["final"] * (number - 1))
    assert torch.equal(loaded.tensors["theta"], tensors()["theta"])
    assert loaded.tensors["exp_avg/a"].tolist() == [1.0] * 4


def test_a_state_of_a_version_that_named_no_author_is_read(tmp_path):
    first = FirstBody(*(getattr(BODY, name) for name in FirstBody.__struct_fields__))
    generations.begin(tmp_path / "state", tensors(), codec.encode(first)).finish()
    found = load_local(tmp_path / "state", RUN)
    assert (found.body, found.body.author) == (BODY, "")


def rare(value):
    return generations.Rare({"exp_avg/b": torch.full((9, 5), float(value))}, write_parts)


def rare_value(folder):
    found = generations.load(folder)
    return found and float(found.tensors["exp_avg/b"][0, 0]), found and found.tensors["exp_avg/a"].tolist()


def test_rare_tensors_are_written_when_they_are_due_and_named_otherwise(tmp_path, monkeypatch):
    order = DiskOrder(monkeypatch)
    generations.begin(tmp_path, tensors(1), b"one", rare=rare(1)).finish()
    for value in (2, 3, 4):
        generations.begin(tmp_path, tensors(value), b"more", rare=rare(value), rare_is_saved=True).finish()
    assert (value_of(tmp_path), rare_value(tmp_path)) == (4, (1, [1.0] * 4))
    third, fourth = (tmp_path / f"000000000{at}" / "rare.safetensors" for at in (3, 4))
    assert third.stat().st_ino == fourth.stat().st_ino, "a second name"
    generations.begin(tmp_path, tensors(5), b"more", rare=rare(5)).finish()
    assert rare_value(tmp_path) == (5, [1.0] * 4)
    order.check(*(f"000000000{number}" for number in range(1, 6)))


def test_rare_tensors_are_saved_alone(tmp_path, monkeypatch):
    """The rest is as it was: a stop in the middle of a round."""
    order, state = DiskOrder(monkeypatch), tmp_path / "state"
    generations.begin(state, tensors(0), b"before", rare=rare(0)).finish()
    generations.begin(state, tensors(1), b"body", arrays=arrays(state, 7), rare=rare(1)).finish()
    inode = (state / "0000000002" / "tensors.safetensors").stat().st_ino
    generations.begin_rare(state, rare(2)).finish()
    assert (value_of(state), rare_value(state)) == (1, (2, [1.0] * 4))
    found = generations.load(state)
    assert (found.body, torch.unique(found.tensors["final"]).tolist()) == (b"body", [7])
    assert (state / "0000000003" / "tensors.safetensors").stat().st_ino == inode
    order.check("0000000001", "0000000002", "0000000003")
    assert names(state) == ["0000000001", "0000000003"], "two that do not share their tensors"
    (state / "0000000003" / "tensors.safetensors").write_bytes(b"damaged")
    assert generations.load(state).body == b"before"


@pytest.mark.parametrize("file", ["rare.safetensors", "parts/shard-00001-model-00001-of-00001.safetensors"])
@pytest.mark.parametrize("is_gone", [False, True])
def test_damaged_rare_tensors_begin_anew_because_both_generations_may_have_them(tmp_path, file, is_gone):
    generations.begin(tmp_path, tensors(1), b"one", rare=rare(1)).finish()
    generations.begin(tmp_path, tensors(2), b"two", rare=rare(2), rare_is_saved=True).finish()
    path = tmp_path / "0000000002" / file
    raw = path.read_bytes()
    path.unlink() if is_gone else path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))  # in both
    found = generations.load(tmp_path)
    assert (found.body, float(found.tensors["residual"][0, 0])) == (b"two", 2)
    assert found.tensors.keys() == tensors().keys()
    assert len(found.report) == 1
    assert "rare.safetensors is damaged: what it held begins anew" in found.report[0]


def test_rare_tensors_that_cannot_be_named_are_written(tmp_path):
    generations.begin(tmp_path, tensors(1), b"one", rare=rare(1)).finish()
    (tmp_path / "0000000001" / "rare.safetensors").unlink()
    generations.begin(tmp_path, tensors(2), b"two", rare=rare(2), rare_is_saved=True).finish()
    assert rare_value(tmp_path) == (2, [1.0] * 4)


@pytest.mark.parametrize("file", ["manifest", "tensors.safetensors", "final.array"])
@pytest.mark.parametrize("what", ["flip", "cut", "empty", "tail", "gone"])
def test_a_damaged_newest_falls_back_with_a_report(tmp_path, file, what):
    tmp_path = tmp_path / "state"
    generations.begin(tmp_path, tensors(1), b"one", arrays=arrays(tmp_path, 1)).finish()
    generations.begin(tmp_path, tensors(2), b"two", arrays=arrays(tmp_path, 2)).finish()
    path = tmp_path / "0000000002" / file
    raw = bytearray(path.read_bytes())
    match what:
        case "flip":
            raw[len(raw) // 2] ^= 1
        case "cut":
            del raw[-1]
        case "empty":
            raw.clear()
        case "tail":
            raw += b"\0"
    path.unlink() if what == "gone" else path.write_bytes(raw)
    loaded = generations.load(tmp_path)
    assert loaded.body == b"one"
    assert len(loaded.report) == 1
    assert "0000000002" in loaded.report[0]
    assert generations.load(tmp_path).report == ()  # the damaged one was set aside
    generations.begin(tmp_path, tensors(3), b"three", arrays=arrays(tmp_path, 3)).finish()
    (tmp_path / "0000000002" / file).write_bytes(b"")
    assert generations.load(tmp_path).body == b"one"  # the good one outlived the damaged one


def test_every_flipped_byte_of_a_small_state_is_found(tmp_path):
    tmp_path = tmp_path / "state"
    given = {"y": arrays(tmp_path, 5)["final"]._replace(values=torch.tensor([5]))}
    given["y"].path.write_bytes(bytes([5, *bytes(7)]))
    given["y"] = given["y"]._replace(hash=digest(b"head", given["y"].path.read_bytes()))
    generations.begin(tmp_path, {"x": torch.arange(3)}, b"body", arrays=given).finish()
    for file in (tmp_path / "0000000001").iterdir():
        raw = file.read_bytes()
        for at in range(len(raw)):
            file.write_bytes(raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :])
            with pytest.raises(CorruptFault):
                generations.load(tmp_path)
        file.write_bytes(raw)
    assert generations.load(tmp_path).body == b"body"


def test_both_damaged_is_a_corrupt_fault_every_time(tmp_path):
    for value in (1, 2):
        generations.begin(tmp_path, tensors(value), b"").finish()
        (tmp_path / f"{value:010d}" / "manifest").write_bytes(b"x" * 100)
    for _ in range(2):
        with pytest.raises(CorruptFault) as fault:
            generations.load(tmp_path)
        assert "move" in fault.value.hint


def test_another_run_is_a_corrupt_fault(tmp_path):
    begin_local(tmp_path, replace(BODY, run=RunId(b"x" * 32)), tensors()).finish()
    with pytest.raises(CorruptFault, match="another run"):
        load_local(tmp_path, RUN)


def test_a_future_format_is_a_corrupt_fault(tmp_path):
    generations.begin(tmp_path, tensors(), b"").finish()
    words = tmp_path / "0000000001" / "manifest"
    body = codec.encode(replace(manifests.manifest_of(words.read_bytes()), format=manifests.FORMAT + 1))
    words.write_bytes(digest(body) + body)
    with pytest.raises(CorruptFault, match="format 4"):
        generations.load(tmp_path)


FULL = """
import resource, signal, sys
import torch
from pathlib import Path
from atoll.node.checkpoint import generations
from atoll.protocols.errors import DiskFault

folder = Path(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
generations.begin(folder, {"residual": torch.ones((1, 1000))}, b"old").finish()
try:
    generations.begin(folder, {"residual": torch.ones((1, 10_000))}, b"new").finish()
except DiskFault as fault:
    print(fault.hint)
"""


def test_a_refused_write_is_a_disk_fault_and_changes_nothing(tmp_path):
    """No file may grow beyond 20 kB; in a process of its own, the limit holds for every file that it writes."""
    done = subprocess.run([sys.executable, "-c", FULL, tmp_path], capture_output=True, text=True, check=True)
    assert "limit" in done.stdout
    assert names(tmp_path) == ["0000000001"]
    assert generations.load(tmp_path).body == b"old"


def test_a_full_disk_is_a_disk_fault_and_recovers(tiny_disk):
    one = {"residual": torch.ones((2, 4096))}  # 32 kB
    generations.begin(tiny_disk, one, b"old").finish()
    (tiny_disk / "ballast").write_bytes(bytes(70_000))
    with pytest.raises(DiskFault) as fault:
        generations.begin(tiny_disk, one, b"new").finish()
    assert "free some space" in fault.value.hint
    assert names(tiny_disk) == ["0000000001", "ballast"]
    assert generations.load(tiny_disk).body == b"old"
    (tiny_disk / "ballast").unlink()
    generations.begin(tiny_disk, one, b"new").finish()
    assert generations.load(tiny_disk).body == b"new"


WRITER = """
import json, os, random, select, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from atoll.node.checkpoint import generations

def write_forever(folder, first, pipe):
    value = first
    while True:
        tensors = {"a": torch.full((40, 4096), float(value)), "b": torch.tensor(value)}
        generations.begin(folder, tensors, str(value).encode()).finish()
        os.write(pipe, value.to_bytes(8, "little"))
        value += 1

def one_kill(folder, first, wait_s, after_one):
    # The child is forked before it runs anything but our own single-threaded loop.
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        write_forever(folder, first, writer)
    os.close(writer)
    if after_one:
        select.select([reader], [], [], 60)
    time.sleep(wait_s)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    done = os.read(reader, 1 << 20)
    os.close(reader)
    return int.from_bytes(done[-8:], "little") if done else first - 1

folder, rng, last, unfinished = Path(sys.argv[1]), random.Random(1), 0, 0
folder.mkdir()  # a kill may come before the first save does it
for turn in range(30):
    acknowledged = one_kill(folder, last + 1, rng.uniform(0.001, 0.06), after_one=turn % 2)
    unfinished += any(path.suffix == ".part" for path in folder.iterdir())
    loaded = generations.load(folder)
    value = 0 if loaded is None else int(loaded.body)
    if loaded is not None:
        assert not loaded.report, loaded.report
        assert bool((loaded.tensors["a"] == value).all()) and int(loaded.tensors["b"]) == value
    assert value in (acknowledged, acknowledged + 1), (value, acknowledged)
    last = value
print(json.dumps({"saves": last, "unfinished": unfinished}))
"""


def test_thirty_kills_leave_the_old_or_the_new_state(tmp_path):
    done = subprocess.run([sys.executable, "-c", WRITER, str(tmp_path / "state")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["saves"] >= 15
    assert report["unfinished"] >= 1  # some kills did hit a save in the middle
