"""Which addresses are of one block."""

import pytest

from atoll.p2p.limits.address_block import address_block


@pytest.mark.parametrize(
    ("maddr", "block"),
    [
        ("/ip4/203.0.113.77/tcp/4710", "203.0.113.0/24"),
        ("/ip4/203.0.113.1/udp/1/quic-v1/p2p/QmRelay/p2p-circuit", "203.0.113.0/24"),
        ("/ip6/2001:db8:1:2:3::4/tcp/1", "2001:db8:1:2::/64"),
        ("/ip4/203.0.113.300/tcp/1", ""),
        ("/memory/4", ""),
        ("", ""),
    ],
)
def test_address_blocks(maddr: str, block: str) -> None:
    assert address_block(maddr) == block
