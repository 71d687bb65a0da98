"""The first way that works wins, late ways start early when the others failed, all failures are named."""

import asyncio

import pytest

from atoll.p2p.nat.candidates import race
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.errors import Unreachable


def way(result: str, after_s: float = 0.0, fails: str = ""):
    async def go() -> str:
        await asyncio.sleep(after_s)
        if fails:
            raise Unreachable(fails)
        return result

    return go


def timed(ways) -> tuple[str, float]:
    async def main():
        return await race(ways), asyncio.get_running_loop().time()

    return run_virtual(main())


def test_the_quick_one_wins():
    assert timed({"a": (0.0, way("a", 5)), "b": (0.0, way("b", 1))}) == ("b", 1.0)


def test_a_late_one_waits_for_its_turn():
    assert timed({"a": (0.0, way("a", 5)), "b": (2.0, way("b", 1))}) == ("b", 3.0)
    assert timed({"a": (0.0, way("a", 1)), "b": (2.0, way("b", 0))}) == ("a", 1.0)


def test_failures_let_the_late_ones_start():
    ways = {"a": (0.0, way("", 0.5, "no")), "b": (9.0, way("b", 1)), "c": (9.0, way("c", 2))}
    assert timed(ways) == ("b", 1.5)
    assert timed({"b": (9.0, way("b", 1))}) == ("b", 1.0)


def test_every_failure_is_named():
    with pytest.raises(Unreachable, match=r"a: closed; b: silent"):
        timed({"a": (0.0, way("", 0, "closed")), "b": (1.0, way("", 0, "silent"))})
    with pytest.raises(Unreachable, match="no way"):
        timed({})
