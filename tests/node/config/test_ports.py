"""One port for both transports, the same after a restart, another when it is taken."""

import socket

import pytest

from atoll.node.config.ports import listen_maddrs
from atoll.p2p.host.endpoint import is_loopback
from atoll.protocols.errors import DiskFault


def port_of(maddrs: tuple[str, ...]) -> int:
    return int(maddrs[0].rsplit("/", 1)[1])


def test_what_the_user_wants_is_taken_as_it_is(tmp_path):
    assert listen_maddrs(["/ip4/1.2.3.4/tcp/5"], 9, tmp_path / "port") == ("/ip4/1.2.3.4/tcp/5",)
    assert not (tmp_path / "port").exists()


def test_a_given_port_serves_both_transports(tmp_path):
    assert listen_maddrs([], 4710, tmp_path / "port")[:2] == (
        "/ip4/0.0.0.0/tcp/4710",
        "/ip4/0.0.0.0/udp/4710/quic-v1",
    )


def test_a_picked_port_is_kept_until_somebody_takes_it(tmp_path):
    path = tmp_path / "port"
    first = port_of(listen_maddrs([], 0, path))
    assert port_of(listen_maddrs([], 0, path)) == first
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", first))
        second = port_of(listen_maddrs([], 0, path))
    assert second != first
    assert port_of(listen_maddrs([], 0, path)) == second


@pytest.mark.parametrize("text", [b"", b"nonsense", b"99999999", b"\xff" * 100])
def test_a_damaged_memory_is_no_memory(tmp_path, text):
    (tmp_path / "port").write_bytes(text)
    assert 1024 < port_of(listen_maddrs([], 0, tmp_path / "port")) < 65536


def test_a_disk_that_refuses_is_named(tmp_path):
    with pytest.raises(DiskFault):
        listen_maddrs([], 0, tmp_path / "none" / "port")


def test_loopback():
    assert all(map(is_loopback, ("/ip4/127.0.0.1/tcp/1", "/ip6/::1/tcp/1")))
    assert not all(map(is_loopback, ("/ip4/127.0.0.1/tcp/1", "/ip4/0.0.0.0/tcp/1")))
