"""Snapshots: equal bytes for equal states, readable by the library, trusted by nobody."""

import math
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.node.checkpoint import tensorfile
from atoll.node.checkpoint.snapshot import (
    Snapshot,
    read_own_snapshot,
    read_snapshot,
    write_snapshot,
)
from atoll.node.checkpoint.tensorfile import read_atom, write_atom
from atoll.node.learning.outer.fixed import state_digest
from atoll.protocols.errors import CorruptFault, DecodeError, DiskFault
from atoll.protocols.ids import digest

GOLDEN = "e5a6345297a5ab75add953a1b1608cb6f8f3037e7dd59532cbb48682e4976551"


def all_pieces(tensors, note):
    """A whole file, tensor by tensor."""
    specs = {name: tensorfile.spec_of(tensor) for name, tensor in tensors.items()}
    yield tensorfile.header_bytes(specs, note)
    for name in tensorfile.ordered(specs):
        yield from tensorfile.pieces_of(tensors[name].contiguous().cpu())


@pytest.fixture
def written(tmp_path, snapshot, arena):
    path = tmp_path / "snapshot.safetensors"
    size = write_snapshot(path, snapshot, arena)
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert size == path.stat().st_size == header + 4 * arena.values
    assert [found.name for found in tmp_path.iterdir()] == [path.name]
    return path


@pytest.mark.parametrize("number", [-1, 0, 9, 10, (1 << 24) - 1])
def test_round_trip(tmp_path, snapshot, arena, number):
    path = tmp_path / "s"
    write_snapshot(path, snapshot._replace(round=number), arena)
    again = read_snapshot(path, arena, state_digest)
    assert (again.round, again.state) == (number, snapshot.state)
    assert torch.equal(again.theta_C4096, snapshot.theta_C4096)


def test_equal_states_give_equal_bytes(tmp_path, written, snapshot, arena):
    again = tmp_path / "again"
    write_snapshot(again, read_snapshot(written, arena, state_digest), arena)
    assert again.read_bytes() == written.read_bytes()
    assert digest(again.read_bytes()).hex() == GOLDEN


def test_the_library_reads_it_and_would_write_the_same_bytes(written, snapshot, arena):
    tensors = safetensors.torch.load_file(written)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        place.name: place.shape for place in arena.placements
    }
    with safetensors.safe_open(written, "pt") as file:
        note = file.metadata()
    assert note == {"atoll": f"snapshot/1 round=17 state={snapshot.state.hex()}"}
    assert safetensors.torch.save(tensors, note) == written.read_bytes()


def test_the_writer_equals_the_library_for_every_dtype():
    tensors = {
        "b.x": torch.arange(6, dtype=torch.int32).view(2, 3), "a": torch.arange(3.0),
        "c": torch.ones(5, dtype=torch.uint8),
        "d": torch.arange(2), "e": torch.ones(3, dtype=torch.bfloat16), "é\"": torch.empty(0),
        "scalar": torch.tensor(1.5),
    }  # fmt: skip
    ours = b"".join(bytes(piece) for piece in all_pieces(tensors, 'a "note"'))
    assert ours == safetensors.torch.save(tensors, {"atoll": 'a "note"'})


def test_atoms_lie_where_the_arena_says(arena):
    at = torch.arange(arena.chunks * 4096, dtype=torch.int32).view(arena.chunks, 4096)
    place = next(place for place in arena.placements if place.name.endswith("gate_proj.weight"))
    atom = read_atom(at, place)
    for row, col in ((0, 0), (63, 39), (64, 0), (99, 39)):
        block = place.first_chunk + row // 64 * place.blocks[1] + col // 64
        assert int(atom[row, col]) == block * 4096 + row % 64 * 64 + col % 64
    rebuilt = torch.zeros_like(at)
    for each in arena.placements:
        write_atom(rebuilt, each, read_atom(at, each))
    assert int((rebuilt != 0).sum()) in (arena.values, arena.values - 1)
    assert torch.equal(rebuilt[rebuilt != 0], at[rebuilt != 0])


def damage(raw: bytes, what: str) -> bytes:
    header = 8 + int.from_bytes(raw[:8], "little")
    match what:
        case "empty":
            return b""
        case "short prefix":
            return raw[:7]
        case "cut header":
            return raw[: header - 1]
        case "cut data":
            return raw[:-1]
        case "a tail":
            return raw + b"\0"
        case "huge header":
            return (1 << 62).to_bytes(8, "little") + raw[8:]
        case "long header":
            return (header + 8).to_bytes(8, "little") + raw[8:header] + b" " * 16 + raw[header:]
        case "another name":
            return raw.replace(b"model.norm.weight", b"model.nerm.weight")
        case "another dtype":
            return raw.replace(b'"I32"', b'"F32"', 1)
        case "another shape":
            return raw.replace(b"[70,40]", b"[40,70]", 1)
        case "an overlap":
            return raw.replace(b'"data_offsets":[0,', b'"data_offsets":[4,', 1)
        case "another round form":
            return raw.replace(b"round=17 ", b"round=+7 ")
        case "upper case":
            at = raw.index(b"state=") + 6
            return raw[:at] + raw[at : at + 64].upper() + raw[at + 64 :]
        case "nested JSON":
            return raw[:8] + b"[" * (header - 8) + raw[header:]
        case "a changed weight":
            return raw[:-1] + bytes([raw[-1] ^ 1])
        case "another digest":
            at = raw.index(b"state=") + 6
            return raw[:at] + b"0" * 64 + raw[at + 64 :]
        case _:
            raise AssertionError(what)


DAMAGES = [
    "empty", "short prefix", "cut header", "cut data", "a tail", "huge header", "long header", "another name",
    "another dtype", "another shape", "an overlap", "another round form", "upper case", "nested JSON",
    "a changed weight", "another digest",
]  # fmt: skip


@pytest.mark.parametrize("what", DAMAGES)
def test_damage_is_a_decode_error_of_peers_and_a_corrupt_fault_of_ours(written, arena, what):
    raw = written.read_bytes()
    damaged = damage(raw, what)
    assert damaged != raw
    written.write_bytes(damaged)
    with pytest.raises(DecodeError):
        read_snapshot(written, arena, state_digest)
    with pytest.raises(CorruptFault) as fault:
        read_own_snapshot(written, arena, state_digest)
    assert fault.value.hint


def test_a_state_with_padding_cannot_be_named(tmp_path, snapshot, arena):
    theta = snapshot.theta_C4096.clone()
    theta[-1, -1] = 1
    path = tmp_path / "s"
    write_snapshot(path, Snapshot(theta, 1, state_digest(theta)), arena)
    with pytest.raises(DecodeError, match="digest"):
        read_snapshot(path, arena, state_digest)


def test_a_snapshot_of_another_model_is_refused_before_it_is_read(written, arena):
    other = replace(arena, placements=arena.placements[:-1])
    with pytest.raises(DecodeError):
        read_snapshot(written, other, lambda _: pytest.fail("read"))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.floats(0, 1), flip=st.integers(1, 255), head=st.booleans())
def test_any_flipped_byte_is_found(written, arena, at, flip, head):
    whole = written.read_bytes()
    raw = bytearray(whole)
    end = 8 + int.from_bytes(raw[:8], "little") if head else len(raw)
    raw[min(math.floor(at * end), end - 1)] ^= flip
    path = Path(str(written) + ".flipped")
    path.write_bytes(raw)
    with pytest.raises(DecodeError):
        read_snapshot(path, arena, state_digest)


def test_a_missing_file_is_a_disk_fault(tmp_path, arena):
    with pytest.raises(DiskFault):
        read_snapshot(tmp_path / "none", arena, state_digest)


def test_a_folder_that_is_not_there_is_a_disk_fault(tmp_path, snapshot, arena):
    with pytest.raises(DiskFault) as fault:
        write_snapshot(tmp_path / "none" / "s", snapshot, arena)
    assert fault.value.hint
