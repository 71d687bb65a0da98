"""Files are whole or not there; what the disk refuses is a DiskFault with a hint."""

import errno
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.p2p.system.atomic_files import disk, disk_fault, make_folder, read_whole, write_whole
from atoll.protocols.errors import CorruptFault, DiskFault
from tests.disk_order import DiskOrder


def test_a_file_is_replaced_whole_and_private(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "a" / "b") / "file"
    assert read_whole(path, max_bytes=10) is None
    write_whole(path, b"old")
    write_whole(path, b"new!")
    assert read_whole(path, max_bytes=4) == b"new!"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["file"], "no temporary file is left"
    with pytest.raises(CorruptFault):
        read_whole(path, max_bytes=3)


def test_a_power_loss_leaves_the_old_bytes_or_the_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = DiskOrder(monkeypatch)
    write_whole(tmp_path / "file", b"old")
    write_whole(tmp_path / "file", b"new")
    order.check("file")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT, errno.EACCES, errno.EMFILE])
def test_os_errors_become_disk_faults_with_a_hint(tmp_path: Path, code: int) -> None:
    with pytest.raises(DiskFault) as caught, disk(tmp_path):
        raise OSError(code, os.strerror(code))
    assert caught.value.hint
    assert str(tmp_path) in str(caught.value)


def test_a_full_disk_promises_nothing_of_a_node(tmp_path: Path) -> None:
    """The command that met it ends; the daemon's own line says that the node goes on."""
    assert (
        disk_fault(OSError(errno.ENOSPC, ""), tmp_path).line().endswith("No space left on device; free some space")
    )


def test_a_folder_that_cannot_be_made_was_not_there() -> None:
    with pytest.raises(DiskFault) as caught:
        make_folder(Path("/proc/nope/here"))
    assert caught.value.line() == "/proc/nope/here: this folder cannot be made; choose another --home"


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as link:
        link.bind(str(path))


def make_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [make_pipe, make_socket, make_device, Path.mkdir])
def test_what_is_no_file_is_a_disk_fault_that_says_what_to_do(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    """A pipe in the place of `leases` blocked the start of a node, and no signal ended it."""
    path = tmp_path / "leases"
    make(path)
    with pytest.raises(DiskFault) as caught:
        read_whole(path, max_bytes=10)
    assert str(path) in caught.value.line()
    assert "move it away" in caught.value.hint


@pytest.mark.parametrize("code", [errno.ENXIO, errno.EOPNOTSUPP])
def test_a_socket_is_told_as_each_system_names_it(tmp_path: Path, code: int) -> None:
    """Linux opens none with ENXIO, macOS with EOPNOTSUPP."""
    assert "move it away" in disk_fault(OSError(code, os.strerror(code)), tmp_path).hint


def test_a_missing_folder_is_a_disk_fault(tmp_path: Path) -> None:
    with pytest.raises(DiskFault, match="No such file"):
        write_whole(tmp_path / "gone" / "file", b"data")


_FILL = """
import sys
from pathlib import Path
from atoll.p2p.system.atomic_files import write_whole
from atoll.protocols.errors import DiskFault
try:
    write_whole(Path(sys.argv[1]), bytes(1 << 20))
except DiskFault as fault:
    print(fault.line())
"""


def test_a_write_that_fails_half_way_leaves_the_old_file(tmp_path: Path) -> None:
    """A real refusal in the middle of a file: the size limit of the process."""
    path = tmp_path / "file"
    write_whole(path, b"old")

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))

    done = subprocess.run(
        [sys.executable, "-c", _FILL, str(path)], preexec_fn=limit, capture_output=True, text=True, check=True
    )
    assert "too large" in done.stdout
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
