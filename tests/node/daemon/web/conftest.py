"""The node whose page the tests of this room read."""

import pytest

from atoll.node.daemon.web.site import Site
from atoll.protocols.local.control_messages import Status
from tests.node.daemon.web.fed_node import Node


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def status(node: Node) -> Status:
    return node.now


@pytest.fixture
def site(node: Node) -> Site:
    """Its page on loopback; the clock stands."""
    return Site(node)
