"""The daemon's end of one worker process."""

import asyncio
import contextlib
import os
import signal

from atoll.node.ipc.framing import frame
from atoll.p2p.host.framing import PREFIX_BYTES, check_open, frame_size
from atoll.protocols import codec
from atoll.protocols.local import worker_messages


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
