"""Trained rounds on their way to the disk, while the worker goes on with the next one.

The kernel has the bytes when a save begins: from then on the tensors may change. Waiting for the disk is left to a
thread, for one save at a time. A round is safe, and may be announced, when the save that holds it has ended well.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from atoll.node.checkpoint.disk import write_file
from atoll.protocols.errors import AtollError
from atoll.protocols.ids import Digest
from atoll.protocols.local.worker_messages import TrainReply


class Keeping:
    """The rounds that are trained and not safe yet, with their payloads until these are files."""

    def __init__(self, ended: Callable[[], None]) -> None:
        """`ended` is called when a save has ended, well or not, from its thread."""
        self._ended = ended
        self._threads = ThreadPoolExecutor(1, "save")
        self._running: Future[None] | None = None
        self._unsafe: dict[int, tuple[TrainReply, bytearray]] = {}
        self._saving: tuple[int, ...] = ()
        """Those that the newest save holds."""
        self._fault: AtollError | None = None

    def add(self, trained: TrainReply, payload: bytearray) -> None:
        """The next save holds this too."""
        self._unsafe[trained.pending.round] = (trained, payload)

    def holds(self, number: int) -> bool:
        """Whether this round is not safe yet."""
        return number in self._unsafe

    @property
    def payloads(self) -> dict[Digest, bytearray]:
        """Those that may not be files yet."""
        return {done.pending.payload: payload for done, payload in self._unsafe.values()}

    def begin(self, finish: Callable[[], None], drop: Callable[[], None]) -> None:
        """Put the payloads on the disk, then `finish` the save, beside what the caller does. See `wait`.

        `drop` instead where a payload could not be written.
        """
        assert self._running is None, "one save at a time"
        self._saving = tuple(self._unsafe)
        files = [(Path(done.pending.path), payload) for done, payload in self._unsafe.values()]

        def work() -> None:
            try:
                for path, payload in files:
                    write_file(path, [memoryview(payload)])
            except BaseException:
                drop()
                raise
            finish()

        self._running = self._threads.submit(work)
        self._running.add_done_callback(lambda _: self._ended())

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way."""
        return self._running is not None and not self._running.done()

    def wait(self) -> bool | None:
        """Until no save is under way. Whether it ended well: what it held is safe now. None: there was none."""
        running, self._running = self._running, None
        if running is None:
            return None
        error = running.exception()
        if error is not None and not isinstance(error, AtollError):
            raise error
        self._fault = error
        if error is None:
            self._unsafe = {number: held for number, held in self._unsafe.items() if number not in self._saving}
        return error is None

    def check(self) -> None:
        """Raise what went wrong in the save before, once."""
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault
