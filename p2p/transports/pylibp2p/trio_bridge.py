"""Trio beside asyncio in one thread: a trio run that is a guest of the running event loop.

py-libp2p runs on trio only. A guest run was measured against a second thread: the same latency and
throughput within noise, a shorter tail of the event loop's lag (p99 0.4-0.6 ms against 0.9-2.0 ms), and both
sides share objects without locks, because never two of them run at once. Trio allows one run per thread, so
all hosts of one event loop share it; it starts with the first user and ends with the last.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import trio

from atoll.protocols.errors import LocalFault, Unreachable

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _End(Generic[T]):
    """Result or error of a piece of work. A future with an error would complain when nothing waits for it."""

    value: T
    error: Exception | None = None


@dataclass(slots=True, eq=False)
class Guest:
    """The trio run of one event loop."""

    up: "asyncio.Future[None]"
    done: "asyncio.Future[None]"
    users: int = 0
    stopping: bool = False
    nursery: trio.Nursery | None = None
    token: trio.lowlevel.TrioToken | None = None
    stop: trio.Event = field(default_factory=trio.Event)

    async def call(
        self,
        work: Callable[[], Awaitable[T]],
        *,
        within: trio.Nursery | None = None,
        lost: Callable[[T], None] | None = None,
    ) -> T:
        """Await `work` in trio, in the nursery `within`, and return or raise what it does.

        A cancellation of the asyncio caller cancels `work` and waits for its end; when it had succeeded just
        before, `lost` gets the result. When trio cancels `work` (its nursery ends), this raises Unreachable.
        """
        nursery = within or self.nursery
        if nursery is None or self.token is None:
            raise Unreachable("the network is not being served")
        result: asyncio.Future[_End[T]] = asyncio.get_running_loop().create_future()
        scope = trio.CancelScope()
        self.token.run_sync_soon(_start, nursery, work, scope, result)
        try:
            await asyncio.shield(result)
        except asyncio.CancelledError:
            self.token.run_sync_soon(scope.cancel)
            await wait_out(result)
            late = result.result()
            if lost is not None and late.error is None:
                lost(late.value)
            raise
        end = result.result()
        if end.error is not None:
            raise end.error
        return end.value


_guests: dict[asyncio.AbstractEventLoop, Guest] = {}
"""Trio allows one run per thread, and a thread runs one event loop at a time."""


@contextlib.asynccontextmanager
async def trio_guest() -> AsyncIterator[Guest]:
    """Use the event loop's trio run: the first user starts it and the last one ends it."""
    guest = await _enter()
    try:
        await asyncio.wait((guest.up, guest.done), return_when=asyncio.FIRST_COMPLETED)
        yield guest
    finally:
        guest.users -= 1
        if not guest.users:
            guest.stopping = True
            guest.stop.set()
            await wait_out(guest.done)


async def wait_out(future: "asyncio.Future[Any]") -> None:
    """Wait until `future` is done; a cancellation is raised only after that."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait((future,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def _enter() -> Guest:
    loop = asyncio.get_running_loop()
    while (guest := _guests.get(loop)) is not None and guest.stopping:
        await asyncio.shield(guest.done)
    if guest is None:
        guest = _guests[loop] = _begin(loop)
    guest.users += 1
    return guest


def _begin(loop: asyncio.AbstractEventLoop) -> Guest:
    guest = Guest(loop.create_future(), loop.create_future())

    def over(result: Any) -> None:
        _guests.pop(loop, None)
        guest.nursery = guest.token = None
        guest.done.set_result(None)
        result.unwrap()  # a bug of ours: calls keep their errors to themselves

    def soon(work: Callable[[], None]) -> None:
        loop.call_soon(work)

    def soon_from_anywhere(work: Callable[[], None]) -> None:
        loop.call_soon_threadsafe(work)

    try:
        trio.lowlevel.start_guest_run(
            _main,
            guest,
            run_sync_soon_threadsafe=soon_from_anywhere,
            run_sync_soon_not_threadsafe=soon,
            done_callback=over,
            host_uses_signal_set_wakeup_fd=True,
        )
    except RuntimeError as error:
        raise LocalFault(f"trio cannot run beside this event loop: {error}") from error
    return guest


async def _main(guest: Guest) -> None:
    async with trio.open_nursery() as guest.nursery:
        guest.token = trio.lowlevel.current_trio_token()
        guest.up.set_result(None)
        await guest.stop.wait()
        guest.nursery.cancel_scope.cancel()


def _failed(error: Exception) -> _End[Any]:
    return _End(None, error)


def _start(
    nursery: trio.Nursery,
    work: Callable[[], Awaitable[T]],
    scope: trio.CancelScope,
    result: "asyncio.Future[_End[T]]",
) -> None:
    try:
        nursery.start_soon(_run_work, work, scope, result)
    except RuntimeError:  # the nursery has ended since
        result.set_result(_failed(Unreachable("the network stopped")))


async def _run_work(
    work: Callable[[], Awaitable[T]], scope: trio.CancelScope, result: "asyncio.Future[_End[T]]"
) -> None:
    """Run `work` and set its outcome, also when trio cancels this task."""
    end: _End[T] = _failed(Unreachable("the network stopped"))
    try:
        with scope:
            end = _End(await work())
    except Exception as error:  # it is the caller's
        end = _failed(error)
    finally:
        result.set_result(end)
