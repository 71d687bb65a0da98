"""`together` ends at the first failure, and leaves nothing behind that only the collector would find."""

import asyncio
import gc
import weakref
from collections.abc import Iterator
from contextlib import suppress

import pytest

from atoll.p2p.system.waiting import together


class Held:
    """What a part of the work has in its hands."""


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("late", [0, 1])
def test_the_first_error_alone_is_raised_and_the_others_are_cancelled(late):
    ended: list[str] = []

    async def fails() -> None:
        for _ in range(late):
            await asyncio.sleep(0)
        raise ValueError("first")

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("waits")

    async def main() -> None:
        with pytest.raises(ValueError, match="first") as raised:
            await together(waits(), fails())
        assert raised.value.__cause__ is None

    asyncio.run(main())
    assert ended == ["waits"]


def test_what_ended_with_an_error_is_gone_at_once(no_collector):
    held: list[weakref.ref[Held]] = []

    async def fails() -> None:
        mine = Held()
        held.append(weakref.ref(mine))
        await asyncio.sleep(0)
        raise ValueError

    async def waits() -> None:
        mine = Held()
        held.append(weakref.ref(mine))
        await asyncio.Event().wait()

    async def main() -> None:
        with suppress(ValueError):
            await together(fails(), waits())
        await asyncio.sleep(0)  # the loop lets go of the handles of ended tasks

    asyncio.run(main())
    assert len(held) == 2
    assert not any(ref() for ref in held)
