"""The worker's loop: what it does while a round waits for its fold, without a process around it."""

import threading
from collections.abc import Iterator
from pathlib import Path

from atoll.node.worker import Worker
from atoll.protocols import codec
from atoll.protocols import worker as w
from atoll.protocols.errors import Superseded
from atoll.protocols.ids import Round
from tests.node.session_home import ME, OVERLAPPING, member


class Daemon:
    """Both ends of the pipe. An ask is there only when the worker waits for one: it never looks in between."""

    def __init__(self, home: Path) -> None:
        self.said: list[w.Answer] = []
        self.waits = 0
        self._news = threading.Event()
        self._is_keeping = False
        self._script = self.script(str(home))

    def script(self, home: str) -> Iterator[w.Ask]:
        yield w.Start(codec.encode(OVERLAPPING), ME, home, "", 1, "cpu")
        yield w.Train(Round(0), 0, 1, 2, -1)
        first = self.said[-1]
        assert isinstance(first, w.Trained)
        yield w.Train(Round(1), 0, 1, 2, 0)
        assert self.said[-1] is first, "the round waits"
        yield w.Keep(Round(0))
        assert isinstance(self.said[-1], w.Kept)
        yield w.Evaluate()
        assert isinstance(self.said[-1], w.Evaluated)
        yield w.Fold(Round(0), (member(first.pending),))
        second = self.said[-1]
        assert isinstance(second, w.Trained)
        assert second.overlapped == 1
        yield w.Train(Round(2), 0, 1, 2, 1)
        yield w.Train(Round(3), 0, 1, 2, -1)
        yield w.Stop()

    def waiting(self) -> bool:
        return False

    def wait(self) -> bool:
        """The next ask does not come before Keep is answered."""
        if self._is_keeping:
            assert self._news.wait(timeout=60)
            self._news.clear()
        return not self._is_keeping

    def wake(self) -> None:
        self._news.set()

    def take(self) -> w.Request | None:
        self.waits += 1
        ask = next(self._script)
        self._is_keeping = isinstance(ask, w.Keep)
        return w.Request(self.waits, ask)

    def send(self, reply: w.Reply) -> None:
        self._is_keeping = self._is_keeping and not isinstance(reply.answer, w.Kept)
        if not isinstance(reply.answer, w.Progress):
            self.said.append(reply.answer)


def test_a_round_that_waits_blocks_on_the_inbox_and_goes_on_with_its_fold(tmp_path):
    daemon = Daemon(tmp_path)
    Worker(daemon, daemon).run()
    kinds = [type(answer).__name__ for answer in daemon.said]
    assert kinds == [
        *("Started", "Trained", "Kept", "Evaluated", "Folded", "Trained", "Failed", "Trained", "Stopped"),
    ]
    assert daemon.said[6].fault == Superseded.__name__
    assert daemon.said[7].pending.round == 3
