"""Child processes of a bench: each obeys orders, one JSON line in, one JSON line out.

A child ends when its standard input ends, and the kernel ends it when the bench is gone.
"""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import IO, Any, TypeVar

import msgspec

from atoll.p2p.system.child_processes import die_with_parent
from atoll.protocols.errors import AtollError, LocalFault

T = TypeVar("T")

_LINE_BYTES = 1 << 20
_END_S = 10.0
_TAIL_BYTES = 2000

Orders = Mapping[str, Callable[..., Awaitable[Any]]]


class Child:
    """One running child. Made by `started`."""

    def __init__(self, process: asyncio.subprocess.Process, name: str, complaints: IO[bytes]) -> None:
        self._process = process
        self._complaints = complaints
        self.name = name

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def ask(self, order: str, deadline_s: float = 300.0, **arguments: Any) -> Any:
        """What the child answers. Raises LocalFault when it fails, ends or takes longer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(deadline_s):
                self._process.stdin.write(msgspec.json.encode([order, arguments]) + b"\n")
                await self._process.stdin.drain()
                line = await self._process.stdout.readline()
        except TimeoutError as error:
            raise LocalFault(f"{self.name} did not do {order!r} within {deadline_s:.0f} s") from error
        except OSError:
            line = b""  # it ended before it took the whole order
        if not line:
            raise LocalFault(f"{self.name} ended while it did {order!r}: {await self._last_words()}")
        answer = msgspec.json.decode(line)
        if "error" in answer:
            raise LocalFault(f"{self.name} could not do {order!r}: {answer['error']}")
        return answer["value"]

    async def end(self) -> None:
        """Ask, wait, insist. Returns when the child is reaped."""
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_S):
                    await self._process.wait()
        finally:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.send_signal(signal.SIGKILL)
                await self._process.wait()

    async def _last_words(self) -> str:
        """The end of its standard error. It has ended, or it ends now."""
        await self.end()
        self._complaints.seek(0)
        lines = self._complaints.read()[-_TAIL_BYTES:].decode(errors="replace").split("\n")
        return " / ".join(lines[-4:]).strip(" /") or f"exit status {self._process.returncode}"


@contextlib.asynccontextmanager
async def started(module: str, *arguments: str, within: Sequence[str] = ()) -> AsyncIterator[Child]:
    """`python -m module arguments`, behind the words of `within`; ended at the end of the block.

    Raises LocalFault when it cannot start.
    """
    words = (*within, sys.executable, "-m", module, *arguments)
    with tempfile.TemporaryFile() as complaints:
        try:
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=complaints,
                limit=_LINE_BYTES,
                start_new_session=True,  # Ctrl-C is for the bench, which ends its children in order
                preexec_fn=die_with_parent(os.getpid()),
            )
        except OSError as error:
            raise LocalFault(f"cannot start {words[0]}: {error}") from error
        child = Child(process, module.rpartition(".")[2], complaints)
        try:
            yield child
        finally:
            await child.end()


async def enter_all(
    stack: contextlib.AsyncExitStack, managers: Sequence[AbstractAsyncContextManager[T]]
) -> list[T]:
    """Enter all at the same time: children take a second each to start. Raises what the first failure raised."""
    try:
        async with asyncio.TaskGroup() as group:
            entering = [group.create_task(stack.enter_async_context(manager)) for manager in managers]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in entering]


async def obey(orders: Orders) -> None:
    """The child's side: do what each line of standard input says, until it ends.

    An AtollError is an answer; anything else ends the child, and its traceback is its last words.
    """
    with _answers() as answers:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=_LINE_BYTES)
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            order, arguments = msgspec.json.decode(line)
            try:
                answer = {"value": await orders[order](**arguments)}
            except AtollError as error:
                answer = {"error": error.line()}
            answers.write(msgspec.json.encode(answer) + b"\n")
            answers.flush()
        transport.close()


@contextlib.contextmanager
def _answers() -> Iterator[IO[bytes]]:
    """Standard output for answers only: what libraries print goes to standard error from here on."""
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        yield answers
