"""One model, many clients: texts are written one after the other, and a client that goes ends its own."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from atoll.node.generation.conversation import Message
from atoll.node.generation.options import Answer, TextOptions

WAITING_MOST = 16
"""Requests that wait or are being answered."""


class Writer(Protocol):
    """What is needed of a LanguageModel."""

    context: int
    has_template: bool

    def tokens_of(self, prompt: str) -> list[int]:
        """The tokens of a prompt."""
        ...

    def chat_tokens(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation in the model's template."""
        ...

    def generate(self, prompt: Sequence[int], options: TextOptions, emit: Callable[[str], object]) -> Answer:
        """Write after the prompt, piece by piece."""
        ...


class Busy(Exception):
    """As many requests wait as may."""


class _ClientGone(Exception):
    """Ends a generation that nobody waits for."""


class WriterQueue:
    """Writes texts in a thread, one at a time, in the order of the requests."""

    def __init__(self, model: Writer) -> None:
        self._model = model
        self._thread = ThreadPoolExecutor(1, "generate")
        self._waiting = 0

    async def write(
        self, prompt: Callable[[], Sequence[int]], options: TextOptions
    ) -> AsyncGenerator[str | Answer]:
        """Pieces of the text as they come, then the Answer. Closing the iterator ends the generation.

        `prompt` gives the tokens; it runs in the thread too, since a long text takes time. Raises Busy, and what
        `prompt` and the model raise.
        """
        if self._waiting >= WAITING_MOST:
            raise Busy
        loop, gone = asyncio.get_running_loop(), threading.Event()
        # A piece has a token at least, but the first and the last: the prompt and its answer fit the context.
        pieces: asyncio.Queue[str | None] = asyncio.Queue(self._model.context + 4)

        def emit(text: str) -> None:
            if gone.is_set():
                raise _ClientGone
            loop.call_soon_threadsafe(pieces.put_nowait, text)

        def work() -> Answer:
            emit("")
            tokens = prompt()
            return self._model.generate(tokens, options, emit)

        self._waiting += 1
        try:
            written = loop.run_in_executor(self._thread, work)
            written.add_done_callback(lambda _: pieces.put_nowait(None))
            while (piece := await pieces.get()) is not None:
                if piece:
                    yield piece
            yield await written
        finally:
            gone.set()
            self._waiting -= 1

    def close(self) -> None:
        """Wait for the thread, which ends with the next token of a text that nobody waits for."""
        self._thread.shutdown(cancel_futures=True)
