"""The daemon's side of the DHT: announces this node, finds the members of a run, lists runs. Results are hints
only.

hivemind's DHTNode runs in a child process (`dht_child`): importing it costs about 280 MB, and it decodes peer
bytes unsafely. The child starts when it is first needed and is restarted when it dies.
"""

import asyncio
import itertools
import logging
import random
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from atoll.p2p.discovery import dht_pipe, dht_records
from atoll.p2p.host.framing import PREFIX_BYTES, frame_size, framed
from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.system.waiting import Notifier, backoff_s
from atoll.protocols import codec
from atoll.protocols.errors import DecodeError, LocalFault, Unreachable
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Digest, RunId
from atoll.protocols.ledger.registers import Addresses
from atoll.protocols.run.run_spec import RunSpec

log = logging.getLogger(__name__)

TTL_S = 600
"""Time to live of our records, in seconds."""
WANTED_RECORDS = 64
"""Records of one run above which most members do not announce: each store costs traffic for all of them."""
WANTED_RUN_RECORDS = 8
"""Announcements of one run, in the list of runs, above which no more are stored."""
_MAX_BACKOFF_S = 120.0
_START_S = 60.0
_STOP_S = 5.0


@dataclass(frozen=True, slots=True)
class DhtStatistics:
    """State of the DHT child, for `atoll status`."""

    is_ready: bool
    restarts: int
    process_id: int | None
    maddrs: tuple[str, ...]
    """Multiaddrs on which the child's p2pd listens."""
    last_error: str


class Dht:
    """Supervises the DHT child and sends it requests."""

    def __init__(
        self,
        identity: Identity,
        options: Callable[[], dht_pipe.ChildOptions],
        *,
        rng: random.Random,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`options()` is called at each start of the child; it may raise LocalFault while the host has no p2pd."""
        self._identity = identity
        self._options = options
        self._rng = rng
        self._clock = wall_clock
        self._wanted = Notifier()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dht_pipe.Stored | dht_pipe.Found]] = {}
        self._process: Process | None = None
        self._ready = asyncio.Event()
        self._maddrs: tuple[str, ...] = ()
        self._starts = 0
        self._last_error = ""

    async def serve(self) -> None:
        """Keep a child running, from its first use until cancelled."""
        await self._wanted.wait()
        failures = 0
        while True:
            started = time.monotonic()
            try:
                await self._run_child()
            except (Unreachable, LocalFault) as error:
                self._last_error = str(error)
                log.info("%s; it is started again", error)
            failures = 0 if time.monotonic() - started > _MAX_BACKOFF_S else failures + 1
            await asyncio.sleep(backoff_s(failures + 1, self._rng, max_s=_MAX_BACKOFF_S))

    async def wait_ready(self) -> None:
        """Wait until the child serves; start it if it never ran."""
        self._wanted.notify()
        await self._ready.wait()

    async def announce(self, run: RunId, maddrs: tuple[str, ...], run_file: bytes = b"") -> bool:
        """Store our addresses under the run and, with `run_file`, the run in the list of runs; False if not
        needed.

        Raises Unreachable. The caller owns the deadline.
        """
        members = await self._find(dht_records.run_key(run))
        if self._is_spared(len(members), WANTED_RECORDS):
            return False
        kept = await self._store(dht_records.run_key(run), codec.encode(Addresses(maddrs)))
        if run_file and len(run_file) <= dht_records.VALUE_MAX_BYTES:
            announced = await self._find(dht_records.RUNS_KEY)
            if sum(run_file in record for record in announced) < WANTED_RUN_RECORDS:
                await self._store(dht_records.RUNS_KEY, run_file)
        return kept

    async def find(self, run: RunId) -> list[PeerAddress]:
        """Peers that announce themselves as members of the run, unverified. Raises Unreachable."""
        return dht_records.read_addresses(await self._find(dht_records.run_key(run)), run, self._clock())

    async def runs(self) -> dict[RunId, RunSpec]:
        """Announced runs, each signed by its owner. Raises Unreachable."""
        return dht_records.read_runs(await self._find(dht_records.RUNS_KEY), self._clock())

    def restart(self) -> None:
        """Restart the child, because the p2pd that it is attached to died."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def statistics(self) -> DhtStatistics:
        """Current state of the child."""
        pid = self._process.pid if self._process else None
        return DhtStatistics(
            is_ready=self._ready.is_set(),
            restarts=max(0, self._starts - 1),
            process_id=pid,
            maddrs=self._maddrs,
            last_error=self._last_error,
        )

    def _is_spared(self, records: int, wanted: int) -> bool:
        return records > wanted and self._rng.random() > wanted / records

    async def _store(self, key: Digest, value: bytes) -> bool:
        data = dht_records.sign_record(self._identity, key, value, int(self._clock()) + TTL_S)
        answer = await self._ask(dht_pipe.Store(next(self._numbers), data))
        return isinstance(answer, dht_pipe.Stored) and answer.is_kept

    async def _find(self, key: Digest) -> tuple[bytes, ...]:
        answer = await self._ask(dht_pipe.Find(next(self._numbers), key))
        return answer.records if isinstance(answer, dht_pipe.Found) else ()

    async def _ask(self, ask: dht_pipe.Store | dht_pipe.Find) -> dht_pipe.Stored | dht_pipe.Found:
        await self.wait_ready()
        process = self._process
        if process is None or process.stdin is None:
            raise Unreachable("the DHT process is starting")
        future: asyncio.Future[dht_pipe.Stored | dht_pipe.Found] = asyncio.get_running_loop().create_future()
        self._waiting[ask.id] = future
        try:
            process.stdin.write(framed(msgspec.msgpack.encode(ask)))
            await process.stdin.drain()
            return await future
        except ConnectionError as error:
            raise Unreachable("the DHT process is gone") from error
        finally:
            del self._waiting[ask.id]

    async def _run_child(self) -> None:
        """Start the child and serve it until it ends. Raises Unreachable at its end."""
        with tempfile.TemporaryDirectory(prefix="atoll-dht-", ignore_cleanup_errors=True) as folder:
            options = msgspec.structs.replace(self._options(), folder=folder)
            await self._talk(await _spawn(options))

    async def _talk(self, process: Process) -> None:
        self._process = process
        self._starts += 1
        try:
            async with asyncio.TaskGroup() as group:
                words = group.create_task(_last_words(process))
                await self._read_answers(process)
            reason = words.result() or f"exit status {process.returncode}"
            raise Unreachable(f"the DHT process ended: {reason}")
        finally:
            await self._end(process)

    async def _read_answers(self, process: Process) -> None:
        assert process.stdout is not None
        try:
            async with asyncio.timeout(_START_S) as start:
                while True:
                    size = frame_size(await process.stdout.readexactly(PREFIX_BYTES), dht_pipe.FRAME_MAX_BYTES)
                    self._handle(
                        msgspec.msgpack.decode(await process.stdout.readexactly(size), type=dht_pipe.Answer)
                    )
                    start.reschedule(None)
        except (asyncio.IncompleteReadError, TimeoutError, DecodeError, msgspec.MsgspecError):
            if process.returncode is None:
                process.kill()

    def _handle(self, answer: dht_pipe.DhtReady | dht_pipe.Stored | dht_pipe.Found) -> None:
        if isinstance(answer, dht_pipe.DhtReady):
            self._maddrs = answer.maddrs
            self._ready.set()
        elif (future := self._waiting.get(answer.id)) is not None and not future.done():
            future.set_result(answer)

    async def _end(self, process: Process) -> None:
        self._ready.clear()
        self._process = None
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(Unreachable("the DHT process died"))
        if process.stdin is not None:
            process.stdin.close()
        # The end of its stdin lets the child end its own p2pd; a child that hangs is killed.
        try:
            async with asyncio.timeout(_STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
        finally:
            if process.returncode is None:
                process.kill()
        await process.wait()


async def _spawn(options: dht_pipe.ChildOptions) -> Process:
    command = (sys.executable, "-m", "atoll.p2p.discovery.dht_child", msgspec.json.encode(options).decode())
    try:
        return await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True
        )
    except OSError as error:
        raise LocalFault(f"the DHT process does not start: {error}") from error


async def _last_words(process: Process) -> str:
    """Drain the child's stderr and return its last line."""
    assert process.stderr is not None
    last = ""
    while block := await process.stderr.read(1 << 14):
        lines = block.decode(errors="replace").strip().splitlines()
        last = lines[-1][:200] if lines else last
        log.debug("dht child: %s", last)
    return last
