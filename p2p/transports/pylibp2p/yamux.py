"""py-libp2p's yamux, made fit for peers that are slow, silent or hostile.

What 0.8.1 does, and what is done about it here:

- A cancelled writer cuts a frame, which breaks the connection for all streams: frames are shielded.
- A writer that gets no window for 5 s fails: `Lane.write` waits for window itself, woken by its arrival.
- Every small read sends a window update, and together they grant more than was read: `Lane` reads the buffers
  itself and grants in halves of the window.
- A peer that ignores the window fills our memory (there is only a warning): it loses the connection.
- The ping measures a time but never ends a dead connection: ours does.
- A reset forgets the stream without waking its reader, or keeps it when bytes arrive meanwhile, and does
  nothing at all when both sides have ended: `Lane.drop` wakes, clears and forgets.
- `open_stream` loses a slot for ever when it is cancelled: it is shielded.
"""

from collections.abc import Callable
from struct import Struct
from typing import Any, Final

import trio
from libp2p.io.exceptions import IncompleteReadError, IOException
from libp2p.stream_muxer.yamux.yamux import (
    DEFAULT_WINDOW_SIZE,
    FLAG_SYN,
    TYPE_DATA,
    TYPE_PING,
    YAMUX_HEADER_FORMAT,
    Yamux,
    YamuxStream,
)

from atoll.protocols.errors import Unreachable

FRAME: Final = Struct(YAMUX_HEADER_FORMAT)
"""Version, type, flags, stream, length."""
_WINDOW_MAX_BYTES: Final = 4 * 1024 * 1024
"""Unread bytes of one stream; enough for 60 ms at 500 Mbit/s."""
_FRAME_BYTES: Final = 65535 - 16 - 12
"""Payload of a frame that fits one Noise message with its header."""
_NEGOTIATION_BYTES: Final = 1024

_RECHECK_S: Final = 0.5
"""A connection that breaks does not wake a writer without window; the writer checks this often."""


class Muxer(Yamux):
    """One multiplexed connection. `keepalive_s` and `abort` are set before `start`."""

    keepalive_s: float = 10.0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.stream_buffers = _Buffers(self._overrun)

    async def open_lane(self) -> "Lane":
        """Open a stream. Raises Unreachable when 256 of them are open."""
        if not self.stream_backlog_semaphore.value:
            raise Unreachable("too many streams are open to this peer")
        with trio.CancelScope(shield=True):
            return Lane(self, await self.open_stream())

    async def accept_lane(self) -> "Lane":
        """Accept the peer's next stream. Raises MuxedConnUnavailable at the end of the connection."""
        stream = await self.accept_stream()
        assert isinstance(stream, YamuxStream)
        return Lane(self, stream)

    async def forget(self, stream: YamuxStream) -> None:
        """Drop the state of a stream that is over, unless it has unread bytes."""
        await self._finalize_stream(stream, fully_closed=True)

    async def send_frame(self, frame: bytes) -> None:
        """Send a whole frame. Raises IOException."""
        await self._write_frame(frame)

    async def _write_frame(self, data: bytes) -> None:
        with trio.CancelScope(shield=True):
            async with self._write_lock:
                await self.secured_conn.write(data)

    async def _read_data_body(self, length: int) -> bytes:
        if length > _WINDOW_MAX_BYTES:
            self._overrun()
            raise IncompleteReadError(f"a frame of {length} bytes")
        return await super()._read_data_body(length)

    async def _measure_rtt_loop(self) -> None:
        """Ping until the end of the connection, and end it when no answer comes."""
        while not self.event_shutting_down.is_set():
            self._ping_id = (self._ping_id + 1) % (1 << 32)
            self._ping_event, self._ping_sent_time = trio.Event(), trio.current_time()
            await self._write_frame(FRAME.pack(0, TYPE_PING, FLAG_SYN, 0, self._ping_id))
            if not await self._answered():
                self.event_shutting_down.set()
                await self.secured_conn.close()  # which wakes `handle_incoming`, and that ends everything
                return
            await trio.sleep(self.keepalive_s)

    async def _answered(self) -> bool:
        """Wait in two halves: after a long block of the event loop the answer is found in the second."""
        for _ in range(2):
            with trio.move_on_after(self.keepalive_s / 2):
                await self._ping_event.wait()
                return True
        return False

    def _overrun(self) -> None:
        """End the connection after this frame: the peer sent more than it may."""
        self.event_shutting_down.set()


class Lane:
    """One stream of a Muxer: reads and writes for one reader and one writer in trio."""

    def __init__(self, muxer: Muxer, stream: YamuxStream) -> None:
        self._muxer = muxer
        self._stream = stream
        self._window = _WindowLock()
        self._granted = DEFAULT_WINDOW_SIZE
        self._ungranted = 0
        self._given_up = False
        self._granted_at = trio.current_time()
        # A writer that waits for window is woken when the lock around the window is released.
        setattr(stream, "window_lock", self._window)  # noqa: B010 -- its type is a final class of trio

    async def read(self, n: int | None = None) -> bytes:
        """Read up to `n` bytes for the negotiation of a protocol. Raises IOException at the end."""
        wanted = n or 0
        if wanted > _NEGOTIATION_BYTES:
            raise IOException(f"a protocol name of {wanted} bytes")
        data = await self.receive(wanted)
        if not data:
            raise IOException("the stream ended")
        self._ungranted += len(data)
        return data

    async def receive(self, most: int | None = None) -> bytes:
        """Return what has arrived, at most `most` bytes; waits for the first. Empty at the end, good or bad."""
        number = self._stream.stream_id
        while True:
            buffer = self._muxer.stream_buffers.get(number)
            if buffer:
                data = bytes(buffer[:most])
                del buffer[: len(data)]
                return data
            event = self._muxer.stream_events.get(number)
            if event is None or self._stream.recv_closed or self._stream.closed:
                return b""
            await event.wait()
            if number in self._muxer.stream_events:
                self._muxer.stream_events[number] = trio.Event()

    async def grant(self, size: int) -> None:
        """Let the peer send `size` bytes again; the window grows when the peer waits for us."""
        self._ungranted += size
        if self._ungranted < self._granted // 2 or self._stream.recv_closed:
            return
        now = trio.current_time()
        if now - self._granted_at < 4 * max(self._muxer.rtt(), 0.001) and self._granted < _WINDOW_MAX_BYTES // 2:
            self._ungranted += self._granted
            self._granted *= 2
        self._granted_at = now
        grant, self._ungranted = self._ungranted, 0
        self._stream.recv_window += grant
        await self._stream.send_window_update(grant)

    async def write(self, data: bytes) -> None:
        """Send all of `data`, as the peer's window allows. Raises IOException.

        Not by way of yamux's own stream: it takes three more locks per frame, each a turn of the scheduler.
        """
        number, view = self._stream.stream_id, memoryview(data)
        while view:
            size = min(len(view), _FRAME_BYTES, await self._room())
            self._stream.send_window -= size
            await self._muxer.send_frame(FRAME.pack(0, TYPE_DATA, 0, number, size) + view[:size])
            view = view[size:]

    def give_up(self) -> None:
        """End the wait of a writer: the stream will be dropped."""
        self._given_up = True
        self._window.changed.set()

    async def finish(self) -> None:
        """End our side: nothing follows."""
        await self._stream.close()

    async def drop(self) -> None:
        """Reset unless both sides have finished, and forget the stream."""
        number = self._stream.stream_id
        event = self._muxer.stream_events.get(number)
        with trio.CancelScope(shield=True):
            await self._stream.reset()
            while number in self._muxer.streams:  # it is kept while bytes lie there, and some came meanwhile
                self._muxer.stream_buffers.get(number, bytearray()).clear()
                await self._muxer.forget(self._stream)
        if event is not None:
            event.set()

    async def _room(self) -> int:
        stream = self._stream
        while True:
            if self._given_up or stream.closed or stream.send_closed or self._muxer.event_shutting_down.is_set():
                raise IOException("the stream ended")
            if stream.send_window > 0:
                return stream.send_window
            self._window.changed = trio.Event()
            with trio.move_on_after(_RECHECK_S):
                await self._window.changed.wait()


class _WindowLock:
    """A lock that signals its release; trio's own class is final."""

    def __init__(self) -> None:
        self._lock = trio.Lock()
        self.changed = trio.Event()

    async def __aenter__(self) -> None:
        await self._lock.acquire()

    async def __aexit__(self, *error: object) -> None:
        self._lock.release()
        self.changed.set()


class _Buffer(bytearray):
    """Unread bytes of a stream, at most two windows: a peer may use up the old one and its successor."""

    overrun: Callable[[], None]

    def extend(self, data: Any) -> None:
        if len(self) + len(data) > 2 * _WINDOW_MAX_BYTES:
            self.overrun()
        else:
            super().extend(data)


class _Buffers(dict[int, bytearray]):
    """The buffers of all streams; each bytearray that yamux stores here becomes a bounded one."""

    def __init__(self, overrun: Callable[[], None]) -> None:
        super().__init__()
        self._overrun = overrun

    def __setitem__(self, number: int, buffer: bytearray) -> None:
        bounded = _Buffer(buffer)
        bounded.overrun = self._overrun
        super().__setitem__(number, bounded)
