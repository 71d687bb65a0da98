"""Files of the worker that are mapped: what they hold, and what they cost."""

import contextlib
import os
from pathlib import Path

import pytest

from atoll.node.checkpoint.disk import map_file, map_payload
from atoll.protocols.errors import CorruptFault


def descriptors(folder: Path) -> int:
    """Those of files in this folder: other threads open and close files of their own."""
    held = 0
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):
            held += os.readlink(f"/dev/fd/{name}").startswith(str(folder))
    return held


def test_mapped_files_hold_no_descriptors(tmp_path: Path) -> None:
    """After a change of chain 128 payloads are mapped at once; a container may have a limit of 128 descriptors."""
    maps = []
    for number in range(40):
        path = tmp_path / f"{number}.payload"
        path.write_bytes(bytes([number]) * 5000)
        maps.append(map_file(path))
    assert descriptors(tmp_path) == 0
    for number, mapped in enumerate(maps):
        assert mapped == bytes([number]) * 5000
        assert mapped.readonly


def test_a_mapped_file_outlives_its_name(tmp_path: Path) -> None:
    """Whoever sweeps the spool, or renames a new file over it, changes nothing of what is mapped."""
    path, newer = tmp_path / "one", tmp_path / "two"
    path.write_bytes(b"old")
    newer.write_bytes(b"new")
    mapped = map_file(path)
    newer.replace(path)
    assert (bytes(mapped), bytes(map_file(path))) == (b"old", b"new")
    path.unlink()
    assert bytes(mapped) == b"old"


def test_what_cannot_be_mapped_is_an_error_of_the_disk(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    assert map_file(tmp_path / "empty") == b""
    with pytest.raises(FileNotFoundError):
        map_file(tmp_path / "gone")
    with pytest.raises(CorruptFault, match="is gone"):
        map_payload(str(tmp_path / "gone"))
    with pytest.raises(OSError, match=r"No such device|directory"):
        map_file(tmp_path)
