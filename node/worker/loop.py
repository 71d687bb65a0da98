"""What the worker process does: answers the requests of one daemon, in turn, and trains in between.

While a round is trained, requests are served between two inner steps, and the work of those about the fold
is done beside the steps (background_fold); a round that waits for a fold goes on after the
request that brings it. Openings of our Reductions do not wait for the end of a step: a step of a slow member
takes longer than the patience of those that audit it.
The process ends when the daemon's end of the pipe does.
"""

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Generator
from functools import partial
from typing import TypeAlias, TypeGuard, TypeVar

from atoll.node.ipc.framing import Inbox, ReplyWriter
from atoll.node.worker.schedule.background_fold import BackgroundFold
from atoll.node.worker.schedule.time_account import Doing, TimeAccount
from atoll.node.worker.session import Event, Session
from atoll.p2p.system.c_heap import FreePages
from atoll.protocols.errors import AtollError, CorruptFault, DiskFault, Superseded
from atoll.protocols.local import worker_messages

A = TypeVar("A")
PROGRESS_EVERY_S = 0.5
GIVEN_BACK_S = 4 * 3600.0
"""Seconds between two returns of free pages: the next rounds take them again, and memory dips by megabytes."""
Said: TypeAlias = worker_messages.Answer | worker_messages.StartProgress | worker_messages.TrainProgress


class Worker:
    """Serves one daemon. The session exists from the first Start on."""

    def __init__(self, inbox: Inbox, outbox: ReplyWriter) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._session: Session | None = None
        self._training: tuple[int, Generator[Event, None, None]] | None = None
        self._held = False
        """Whether the round at hand can go on only after another request."""
        self._waiting_saves: list[worker_messages.RequestEnvelope] = []
        """Save requests that wait for the disk."""
        self._background = BackgroundFold(inbox.wake)
        self._progress_at = 0.0
        self._spent = TimeAccount(time.monotonic_ns)
        self._pages = FreePages(time.monotonic, GIVEN_BACK_S)
        self._told = self._spent.read()
        """The newest account that the daemon was given, under the lock `_telling`: none that is older follows."""
        self._telling = threading.Lock()
        inbox.answer_beside(self._open_beside)

    def run(self) -> None:
        """Serve until Stop or until the daemon is gone."""
        while True:
            self._retry_saves()
            self._commit()
            if self._training is None or self._held or self._inbox.has_request():
                self._spent.enter("fold" if self._background.is_busy else "wait")
                if self._inbox.wait() and not self._serve_next():
                    return
            else:
                self._one_step()

    def _retry_saves(self) -> None:
        """Answer each waiting save request, or let it wait on."""
        waiting, self._waiting_saves = self._waiting_saves, []
        for request in waiting:
            self._serve(request)

    def _serve_next(self) -> bool:
        request = self._inbox.receive()
        goes_on = request is not None and self._serve(request)
        self._held = False
        return goes_on

    def _commit(self, *, all_of_them: bool = False) -> None:
        """Answer what was worked on beside the steps; `all_of_them`: and wait until nothing is."""
        while (done := self._background.next_result(wait=all_of_them)) is not None:
            self._spent.enter("fold")
            self._held = False
            self._reply(done.request.id, answered(done.commit))

    def _serve(self, request: worker_messages.RequestEnvelope) -> bool:
        """Answer one request, or see to it that it will be. False after Stop."""
        self._spent.enter(doing(request.ask))
        if self._runs_in_background(request.ask):
            self._background.add(request, partial(self._open().prepare, request.ask))
            return True
        if not isinstance(
            request.ask, worker_messages.SaveRequest | worker_messages.ReportRequest | worker_messages.TrainRequest
        ):
            self._commit(all_of_them=True)
            self._spent.enter(doing(request.ask))
        answer = answered(partial(self._answer, request))
        if answer is not None:
            self._reply(request.id, answer)
        return not isinstance(request.ask, worker_messages.StopRequest)

    def _runs_in_background(self, ask: worker_messages.Ask) -> TypeGuard[worker_messages.FoldAsk]:
        """Whether there are steps that the request can run beside, or others before it are not answered yet."""
        has_steps = self._training is not None and not self._held
        return isinstance(ask, worker_messages.FoldAsk) and (has_steps or self._background.is_busy)

    def _answer(self, request: worker_messages.RequestEnvelope) -> worker_messages.Answer | None:
        match request.ask:
            case worker_messages.StartRequest():
                text = self._session.text_for(request.ask) if self._session is not None else None
                self._end_session()
                report = partial(self._say, request.id)
                self._session = Session(request.ask, self._spent, saved=self._inbox.wake, report=report, text=text)
                return self._session.started()
            case worker_messages.TrainRequest():
                self._begin(request.id, self._open().train(request.ask))
                return None
            case worker_messages.SaveRequest():
                saved = self._open().finish_save(request.ask)
                if saved is None:
                    self._waiting_saves.append(request)
                return saved
            case worker_messages.ReportRequest():
                return worker_messages.ReportReply()
            case worker_messages.StopRequest():
                if self._session is not None:
                    self._session.close()
                return worker_messages.StopReply()
            case _:
                return self._open().answer(request.ask)

    def _end_session(self) -> None:
        """End the session of a chain that the node leaves, as a stop and a new process would, but torch stays."""
        if self._session is None:
            return
        if self._training is not None:
            self._training[1].close()
        self._training, self._held, self._waiting_saves = None, False, []
        with contextlib.suppress(CorruptFault, DiskFault):  # as after a kill: it is asked for again
            self._session.close()
        self._session = None
        gc.collect()  # its memory goes before the next one needs as much
        self._spent = TimeAccount(time.monotonic_ns)

    def _begin(self, number: int, steps: Generator[Event, None, None]) -> None:
        if self._training is not None:
            before, old = self._training
            old.close()
            self._reply(before, failed(Superseded("another round took the place of this one")))
        self._training = (number, steps)

    def _open(self) -> Session:
        if self._session is None:
            raise AtollError("the first message to a worker is Start")
        return self._session

    def _one_step(self) -> None:
        assert self._training is not None
        number, steps = self._training
        self._spent.enter("steps")
        try:
            event = next(steps)
        except (AtollError, OSError, MemoryError) as error:
            self._training = None
            self._reply(number, failed(error))
            return
        self._held = event is None
        if isinstance(event, worker_messages.TrainReply):
            self._training = None
            self._reply(number, event)
            self._pages.give_back()  # a round's end, where a step of some milliseconds waits for nobody
        elif isinstance(event, worker_messages.TrainProgress) and (
            (now := time.monotonic()) - self._progress_at >= PROGRESS_EVERY_S
            or self._open().is_reported(event.step)
        ):
            self._progress_at = now
            self._reply(number, event)

    def _say(self, number: int, phase: str) -> None:
        self._reply(number, worker_messages.StartProgress(phase))

    def _reply(self, number: int, answer: Said) -> None:
        with self._telling:
            self._told = self._spent.read()
            self._outbox.send(worker_messages.ReplyEnvelope(number, answer, self._told))

    def _open_beside(self, request: worker_messages.RequestEnvelope) -> bool:
        """Answer a request for an opening, in the inbox's thread; it only reads. Returns whether it was one."""
        if self._session is None or not isinstance(request.ask, worker_messages.OpenRequest):
            return False
        opening = answered(partial(self._session.answer, request.ask))
        # The account is the main thread's: the newest one is told again, and the daemon counts differences.
        with contextlib.suppress(BrokenPipeError), self._telling:  # the daemon is gone, which `run` is told next
            self._outbox.send(worker_messages.ReplyEnvelope(request.id, opening, self._told))
        return True


def answered(work: Callable[[], A]) -> A | worker_messages.FailureReply:
    """The result of `work`, or the fault that it raised as a message."""
    try:
        return work()
    except (AtollError, OSError, MemoryError) as error:
        return failed(error)


def doing(ask: worker_messages.Ask) -> Doing:
    """The time account's entry for a request; the session may book parts of it under another."""
    match ask:
        case worker_messages.StartRequest():
            return "start"
        case worker_messages.TrainRequest():
            return "steps"
        case worker_messages.EvaluateRequest():
            return "evaluate"
        case worker_messages.AuditRequest():
            return "audit"
        case worker_messages.SaveRequest() | worker_messages.SnapshotRequest():
            return "checkpoint"
        case worker_messages.ReportRequest() | worker_messages.StopRequest():
            return "wait"
    return "fold"


def failed(error: Exception) -> worker_messages.FailureReply:
    """An error as a message: the class decides whose fault it is on the other side."""
    if isinstance(error, AtollError):
        return worker_messages.FailureReply(type(error).__name__, str(error), error.hint)
    if isinstance(error, MemoryError):
        return worker_messages.FailureReply(
            "LocalFault", "out of memory", "use a smaller model, or free memory and start again"
        )
    return worker_messages.FailureReply("DiskFault", str(error), "free or repair the disk")
