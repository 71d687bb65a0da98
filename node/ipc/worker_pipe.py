"""The daemon's end of one worker process, and a worker that begins before there is a daemon."""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

from atoll.node.ipc.framing import frame
from atoll.node.runs.capacity.memory_model import Free
from atoll.p2p.host.framing import PREFIX_BYTES, check_open, frame_size
from atoll.p2p.system.atomic_files import disk
from atoll.p2p.system.child_processes import die_with_parent
from atoll.protocols import codec
from atoll.protocols.errors import LocalFault
from atoll.protocols.local import worker_messages

WORKER = (sys.executable, "-m", "atoll.node.worker.main")
WORKER_LOG = "worker.log"
"""In the folder of a run."""
_NO_PROCESS = "end other programs, or allow more memory, processes and open files (ulimit -v, -u, -n)"


class WorkerPipe:
    """A worker process, its asks and its replies."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.asked = 0
        """Number of the newest ask."""
        self._size: int | None = None
        """Length of the reply that is being read."""

    @property
    def is_alive(self) -> bool:
        """Whether the process was not seen to end."""
        return self.process.returncode is None

    @property
    def was_killed(self) -> bool:
        """Whether it ended by SIGKILL."""
        return self.process.returncode == -signal.SIGKILL

    def write(self, ask: worker_messages.Ask) -> int:
        """Send an ask; returns its number. Few asks at a time: no drain needed. Raises ConnectionError."""
        assert self.process.stdin is not None
        check_open(self.process.stdin)
        self.asked += 1
        self.process.stdin.write(frame(worker_messages.RequestEnvelope(self.asked, ask)))
        return self.asked

    async def read(self) -> worker_messages.ReplyEnvelope:
        """Wait for a reply. Nothing is lost if it is cancelled.

        Raises IncompleteReadError, ConnectionError, DecodeError.
        """
        assert self.process.stdout is not None
        if self._size is None:
            prefix = await self.process.stdout.readexactly(PREFIX_BYTES)
            self._size = frame_size(prefix, worker_messages.FRAME_MAX_BYTES)
        body = await self.process.stdout.readexactly(self._size)
        self._size = None
        return codec.decode(
            body, worker_messages.ReplyEnvelope, max_bytes=worker_messages.FRAME_MAX_BYTES, any_float=True
        )

    async def kill(self) -> None:
        """End the process and those that it started, if it has not ended."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            await self.process.wait()


async def spawn(log_path: Path, nice: int, command: tuple[str, ...] = WORKER) -> tuple[WorkerPipe, int]:
    """A fresh worker, and where its log begins. Raises LocalFault: there is no process for it, or no log."""
    with disk(log_path):
        worker_log = log_path.open("ab")
        log_start = worker_log.tell()
    with worker_log:
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=worker_log,
                start_new_session=True, limit=worker_messages.FRAME_MAX_BYTES + PREFIX_BYTES,
                preexec_fn=die_with_parent(os.getpid(), nice),
            )  # fmt: skip
        except OSError as error:
            raise LocalFault(f"cannot begin the worker's process: {error.strerror}", hint=_NO_PROCESS) from error
    return WorkerPipe(process), log_start


class EarlyWorker:
    """A worker's process that begins before its daemon is there, until the daemon takes it."""

    def __init__(self) -> None:
        self._begun: tuple[WorkerPipe, int] | None = None
        self._log_path = Path()
        self.free: Free | None = None
        """What was free before it began: what it holds itself is no reason to choose less for it."""

    async def begin(self, log_path: Path, nice: int, free: Free, *, command: tuple[str, ...] = WORKER) -> None:
        """Begin the process. Raises DiskFault."""
        self.free, self._log_path = free, log_path
        self._begun = await spawn(log_path, nice, command)

    async def take(self, log_path: Path) -> tuple[WorkerPipe, int] | None:
        """The process, once, and where its log begins; one that logs elsewhere is ended."""
        begun, self._begun = self._begun, None
        if begun is not None and self._log_path != log_path:
            await begun[0].kill()
            return None
        return begun

    async def end(self) -> None:
        """End a worker that nobody took."""
        if (begun := await self.take(self._log_path)) is not None:
            await begun[0].kill()
