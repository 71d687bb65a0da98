"""A small arena with a state, and a digest for it."""

import subprocess

import pytest
import torch

from atoll.node.checkpoint.snapshot import Snapshot
from atoll.node.learning.outer.fixed import clear, padding_of, state_digest
from atoll.protocols.run.arena import Arena, arena_of
from atoll.protocols.run.model_spec import ModelSpec

torch.set_num_threads(1)
MODEL = ModelSpec(
    dim=40, layers=2, heads=4, kv_heads=2, ffn=100, vocab=70, context=16,
    tied=False, rope_theta=10000.0, norm_eps=1e-5,
)  # fmt: skip


@pytest.fixture(scope="session")
def arena() -> Arena:
    return arena_of(MODEL)


@pytest.fixture(scope="session")
def snapshot(arena: Arena) -> Snapshot:
    at = torch.arange(arena.chunks * 4096, dtype=torch.int64).view(arena.chunks, 4096)
    theta = clear(((at * 2654435761) % 4294967296 - 2147483648).to(torch.int32), padding_of(arena))
    return Snapshot(theta, 17, state_digest(theta))


@pytest.fixture
def tiny_disk(tmp_path):
    """A tmpfs of 128 kB; skipped where we may not mount."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", folder], capture_output=True)
    if done.returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)  # a mapping of a file may live
