"""The key file is private, whole, and never replaced."""

import os
import stat
import threading

import pytest

from atoll.p2p.system.key_file import load_or_create
from atoll.protocols.errors import ConfigError, DiskFault
from tests.disk_order import DiskOrder


def test_made_once_and_read_again(tmp_path):
    path = tmp_path / "home" / "key"
    first = load_or_create(path)
    assert load_or_create(path).peer_id == first.peer_id
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert len(path.read_bytes()) == 32
    assert os.listdir(path.parent) == ["key"]
    assert load_or_create(tmp_path / "other").peer_id != first.peer_id


def test_the_key_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    order = DiskOrder(monkeypatch)
    load_or_create(tmp_path / "home" / "key")
    order.check("key")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601])
def test_refuses_a_file_that_others_can_read(tmp_path, mode):
    path = tmp_path / "key"
    load_or_create(path)
    path.chmod(mode)
    with pytest.raises(ConfigError) as caught:
        load_or_create(path)
    assert caught.value.hint == f"chmod 600 {path}"


@pytest.mark.parametrize("data", [b"", b"x" * 31, b"x" * 33])
def test_refuses_a_damaged_file_and_keeps_it(tmp_path, data):
    path = tmp_path / "key"
    path.write_bytes(data)
    path.chmod(0o600)
    with pytest.raises(ConfigError) as caught:
        load_or_create(path)
    assert "backup" in caught.value.hint
    assert path.read_bytes() == data


def test_refuses_what_is_not_a_file(tmp_path):
    (tmp_path / "folder").mkdir(mode=0o700)
    with pytest.raises(ConfigError):
        load_or_create(tmp_path / "folder")
    load_or_create(tmp_path / "key")
    (tmp_path / "link").symlink_to(tmp_path / "key")
    with pytest.raises(ConfigError):
        load_or_create(tmp_path / "link")


def test_a_disk_that_refuses(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises((DiskFault, ConfigError)):
        load_or_create(tmp_path / "file" / "key")


def test_two_starts_at_once_agree(tmp_path):
    found, start = [], threading.Barrier(8)

    def one():
        start.wait()
        found.append(load_or_create(tmp_path / "home" / "key").peer_id)

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert os.listdir(tmp_path / "home") == ["key"]
