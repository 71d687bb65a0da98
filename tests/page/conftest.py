"""A fed node's page on loopback, for a real browser."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import pytest
import pytest_asyncio

from atoll.node.daemon.web.server import ListenAddress, WebServer
from tests.node.daemon.web.fed_node import Node
from tests.node.daemon.web.steered_node import Steered
from tests.page.chromium import Tab, browser, missing, tab_in


@pytest.fixture(autouse=True)
def chromium_is_here() -> None:
    if why := missing():
        pytest.skip(f"NOT TESTED: the page was opened in no browser: {why}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium() -> AsyncIterator[Any]:
    """One browser for the tests of a module: to start it takes longer than most of them."""
    if missing():
        yield None  # and each test is skipped
        return
    async with browser() as found:
        yield found


@pytest.fixture
def tab(chromium: Any) -> Callable[..., AbstractAsyncContextManager[Tab]]:
    """Opens the page with a new profile."""
    return partial(tab_in, chromium)


@pytest.fixture
def node() -> Node:
    made = Node()
    made.rows = []
    for number in range(7):
        made.row(number, final=number < 6)
    return made


@pytest.fixture
def steered(node: Node) -> Steered:
    return Steered(node)


@pytest_asyncio.fixture(loop_scope="module")
async def url(steered: Steered) -> AsyncIterator[str]:
    """The real server with its real caps and pauses, over a node that the test feeds."""
    server = WebServer(ListenAddress("127.0.0.1", 0), steered.site.answer, time.monotonic)
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(server.serve())
        while not server.url:  # noqa: ASYNC110
            await asyncio.sleep(0)
        yield server.url
        serving.cancel()
