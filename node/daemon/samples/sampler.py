"""The node's side of its sample texts: at most one process at a time, started rarely, with a deadline.

Texts are written by libraries that need much memory and may crash. In a process of its own they may: whatever it
does is one line on the page, and the node goes on.
"""

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from atoll.node.daemon.samples.written import ANSWER_BYTES, WrittenSample, printable
from atoll.node.daemon.web.page_data import SampleText
from atoll.p2p.system.atomic_files import disk, make_folder
from atoll.p2p.system.child_processes import die_with_parent, end_child
from atoll.p2p.system.waiting import backoff_s
from atoll.protocols.errors import DiskFault

log = logging.getLogger(__name__)

DEADLINE_S = 1800.0
"""Of one text. A machine whose cores are all in use gives its process about 1 % of one: seconds become minutes."""
LOOK_S = 60.0
"""Until the node looks again whether what stood in the way is over."""
MOST_BACKOFF_S = 6 * 3600.0
COMMAND = (sys.executable, "-m", "atoll.node.generation.sample_child")
WORDS = "sample.log"
"""What the newest process and its libraries printed, in the run's folder."""
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",  # no context in the worker's GPU
    "HF_HUB_OFFLINE": "1",
}


class Sampler:
    """`shown` is what the page shows. `on_event` never waits and never raises; `serve` runs the processes."""

    def __init__(
        self,
        *,
        command: tuple[str, ...],
        folder: Path,
        every_s: float,
        never: str,
        obstacle: Callable[[], str],
        wall: Callable[[], float],
    ) -> None:
        """`folder`: the run's. `never`: why this node writes none, empty if it does. `obstacle`: what stands in
        the way now, empty if nothing does. `wall` gives seconds since 1970."""
        self.shown = SampleText(why=never)
        self._command = command
        self._folder = folder
        self._every_s = every_s
        self._never = never
        self._obstacle = obstacle
        self._wall = wall
        self._has_news = asyncio.Event()
        self._has_news.set()  # the weights of the node's last life, if there are any

    def on_event(self, name: str, facts: Mapping[str, Any]) -> None:
        """Take notice of an event of the journal: another final round is something to write about."""
        if name == "final":
            self._has_news.set()

    async def serve(self) -> None:
        """Write texts until cancelled."""
        if self._never:
            log.warning("no sample text: %s", self._never)
            return
        failures = 0
        while True:
            await self._has_news.wait()
            why = self._obstacle()
            if why:
                self._say(why)
                await asyncio.sleep(min(self._every_s, LOOK_S))
                continue
            self._has_news.clear()
            failures = 0 if await self._is_written() else failures + 1
            pause_s = backoff_s(max(1, failures), first_s=self._every_s, max_s=max(self._every_s, MOST_BACKOFF_S))
            await asyncio.sleep(pause_s)

    def _say(self, why: str) -> None:
        if why != self.shown.why:
            log.info("no new sample text: %s", why)
        self.shown = msgspec.structs.replace(self.shown, why=why)

    async def _is_written(self) -> bool:
        """Run the process once; whether there is a new text."""
        try:
            process = await self._spawn()
        except (OSError, DiskFault) as error:
            self._say(f"its process cannot start: {error}")
            return False
        try:
            async with asyncio.timeout(DEADLINE_S):
                answer = await _answer_of(process)
        except TimeoutError:
            self._say(f"there was none within {DEADLINE_S / 60:.0f} min: this machine has no time to spare")
            return False
        finally:
            await end_child(process)
        return self._accept(answer, process.returncode)

    async def _spawn(self) -> asyncio.subprocess.Process:
        make_folder(self._folder)
        words = self._folder / WORDS
        with disk(words):
            stderr = words.open("wb")
        with stderr:
            return await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=stderr,
                env={**os.environ, **_ENVIRONMENT},
                start_new_session=True, preexec_fn=die_with_parent(os.getpid()),
            )  # fmt: skip

    def _accept(self, answer: bytes, exit_code: int | None) -> bool:
        """Show an answer, and say whether it has a text. A library may have written anything."""
        try:
            found = msgspec.json.decode(answer, type=WrittenSample)
        except msgspec.DecodeError:
            ended = f"signal {-exit_code}" if exit_code is not None and exit_code < 0 else f"exit code {exit_code}"
            self._say(f"its process ended with {ended}; see {WORDS} in the folder of the run")
            return False
        if found.why or not found.text:
            self._say(printable(found.why).replace("\n", " ") or "the model wrote nothing")
            return False
        self.shown = SampleText(round=found.round, unix_s=self._wall(), text=printable(found.text))
        log.info("sample text of final round %d", found.round)
        return True


async def _answer_of(process: asyncio.subprocess.Process) -> bytes:
    """What it wrote until it ended; at most one byte more than is legal, which is no answer."""
    assert process.stdout is not None
    data = b""
    while len(data) <= ANSWER_BYTES and (piece := await process.stdout.read(ANSWER_BYTES + 1 - len(data))):
        data += piece
    if len(data) > ANSWER_BYTES:
        return b""
    await process.wait()
    return data
