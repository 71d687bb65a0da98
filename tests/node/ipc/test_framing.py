"""Frames between daemon and worker: whole messages whatever the pieces, caps before allocation, ends are told."""

import os
import threading

import pytest

from atoll.node.ipc.framing import Inbox, ReplyWriter, frame
from atoll.p2p.host.framing import PREFIX_BYTES, frame_size, size_prefix
from atoll.protocols import codec
from atoll.protocols.errors import DecodeError, LocalFault
from atoll.protocols.ids import PeerId, Round, digest
from atoll.protocols.local.worker_messages import (
    FRAME_MAX_BYTES,
    FoldRequest,
    Member,
    OpenReply,
    OpenRequest,
    ReplyEnvelope,
    RequestEnvelope,
    StopRequest,
    TimeSpent,
    VerifyRequest,
)
from tests.waiting import HANGS_S

FOLD = FoldRequest(Round(3), (Member(digest(b"e"), PeerId("p"), 64, digest(b"p"), "/a/b"),))


def test_requests_arrive_whole_and_in_order_in_whatever_pieces():
    read, write = os.pipe()
    inbox = Inbox(read)
    assert not inbox.has_request()
    wanted = [
        RequestEnvelope(1, FOLD),
        RequestEnvelope(2, VerifyRequest("/x" * 500, Round(0))),
        RequestEnvelope(3, StopRequest()),
    ]
    data = b"".join(map(frame, wanted))

    def dribble() -> None:
        for at in range(0, len(data), 7):
            os.write(write, data[at : at + 7])
        os.close(write)

    writer = threading.Thread(target=dribble)
    writer.start()
    assert [inbox.receive() for _ in wanted] == wanted
    writer.join()
    assert inbox.wait(), "the end is news too"
    assert inbox.has_request()
    assert inbox.receive() is None
    os.close(read)


def test_an_end_within_a_frame_is_the_end():
    read, write = os.pipe()
    os.write(write, frame(RequestEnvelope(1, FOLD))[:-1])
    os.close(write)
    assert Inbox(read).receive() is None
    os.close(read)


def test_replies_larger_than_the_pipe_are_written_completely():
    read, write = os.pipe()
    reply = ReplyEnvelope(7, OpenReply(bytes(200_000)), TimeSpent(wait_ns=1))
    writer = threading.Thread(target=lambda: ReplyWriter(write).send(reply))
    writer.start()
    found = bytearray()
    while len(found) < len(frame(reply)):
        found += os.read(read, 1 << 16)
    writer.join()
    assert codec.decode(bytes(found[PREFIX_BYTES:]), ReplyEnvelope, max_bytes=FRAME_MAX_BYTES) == reply
    os.close(read)
    with pytest.raises(BrokenPipeError):
        ReplyWriter(write).send(reply)
    os.close(write)


def test_frames_above_the_cap_are_neither_sent_nor_read():
    with pytest.raises(LocalFault):
        frame(RequestEnvelope(1, VerifyRequest("x" * FRAME_MAX_BYTES, Round(0))))
    assert frame_size(size_prefix(FRAME_MAX_BYTES), FRAME_MAX_BYTES) == FRAME_MAX_BYTES
    with pytest.raises(DecodeError):
        frame_size(size_prefix(FRAME_MAX_BYTES + 1), FRAME_MAX_BYTES)


def test_what_is_answered_as_it_arrives_is_not_received():
    read, write = os.pipe()
    inbox, seen = Inbox(read), list[RequestEnvelope]()
    inbox.answer_beside(lambda request: seen.append(request) or isinstance(request.ask, OpenRequest))
    wanted = [RequestEnvelope(1, FOLD), RequestEnvelope(2, OpenRequest(Round(3), 7)), RequestEnvelope(3, FOLD)]
    os.write(write, b"".join(map(frame, wanted)))
    assert [inbox.receive(), inbox.receive()] == [wanted[0], wanted[2]]
    assert seen == wanted
    os.close(write)
    assert inbox.receive() is None
    os.close(read)


def test_a_bug_in_what_answers_ends_the_worker_and_hangs_nobody(monkeypatch):
    read, write = os.pipe()
    told = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: told.set())
    inbox = Inbox(read)
    inbox.answer_beside(lambda request: 1 // 0)
    os.write(write, frame(RequestEnvelope(1, FOLD)))
    assert inbox.wait()
    assert inbox.receive() is None
    assert told.wait(HANGS_S)
    os.close(read)
    os.close(write)


def test_a_wait_is_ended_from_another_thread():
    read, write = os.pipe()
    inbox = Inbox(read)
    threading.Timer(0.01, inbox.wake).start()
    assert not inbox.wait()
    inbox.wake()
    assert not inbox.wait(), "the next one, if none is under way"
    os.close(write)
    assert inbox.wait()
    os.close(read)


def test_bytes_that_are_no_request_are_refused():
    read, write = os.pipe()
    os.write(write, size_prefix(3) + b"\xc1\xc1\xc1")
    with pytest.raises(DecodeError):
        Inbox(read).receive()
    os.close(read)
    os.close(write)
