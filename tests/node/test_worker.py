"""The worker's loop: what it does while a round waits for its fold, without a process around it."""

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
        self._script = self.script(str(home))

    def script(self, home: str) -> Iterator[w.Ask]:
        yield w.Start(codec.encode(OVERLAPPING), ME, home, "", 1, "cpu")
        yield w.Train(Round(0), 0, 1, 2, -1)
        first = self.said[-1]
        assert isinstance(first, w.Trained)
        yield w.Train(Round(1), 0, 1, 2, 0)
        assert self.said[-1] is first, "the round waits"
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
        return True

    def wake(self) -> None:
        """Its asks come one after the other whatever happens."""

    def take(self) -> w.Request | None:
        self.waits += 1
        return w.Request(self.waits, next(self._script))

    def send(self, reply: w.Reply) -> None:
        if not isinstance(reply.answer, w.Progress):
            self.said.append(reply.answer)


def test_a_round_that_waits_blocks_on_the_inbox_and_goes_on_with_its_fold(tmp_path):
    daemon = Daemon(tmp_path)
    Worker(daemon, daemon).run()
    kinds = [type(answer).__name__ for answer in daemon.said]
    assert kinds == [
        *("Started", "Trained", "Evaluated", "Folded", "Trained", "Failed", "Trained", "Stopped"),
    ]
    assert daemon.said[5].fault == Superseded.__name__
    assert daemon.said[6].pending.round == 3
