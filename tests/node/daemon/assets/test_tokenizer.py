"""A worker of a run with a tokenizer of its own begins when that is here: fetched, mended, or waited for aloud."""

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from atoll.node.daemon.assets import fetching
from atoll.node.daemon.assets.tokenizer import fetch_tokenizer
from atoll.p2p.blobs.store import BlobStore
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.blobs import manifest_of_bytes
from atoll.protocols.errors import ConfigError, DecodeError, DiskFault, Unreachable
from tests.node.worker.session_home import ME, OTHER, SPEC

DATA = b'{"some": "tokenizer"}' * 1000
BLOB = manifest_of_bytes(DATA).id
SPELLED = replace(SPEC, data=replace(SPEC.data, tokenizer="file", tokenizer_blob=BLOB))
FETCHING = "fetching the tokenizer"
WAITING = "waiting for the tokenizer: nobody reachable has it yet"


class Net:
    """A store, and peers that fail in order before they give the file."""

    def __init__(self, folder: Path, faults: list[Exception]) -> None:
        self.store, self.faults = BlobStore(folder), faults
        self.asked: list[list[str]] = []

    def has_blob(self, blob):
        return self.store.has(blob)

    def delete_blob(self, blob):
        self.store.delete(blob)

    def neighbours(self):
        return [OTHER, ME]

    async def is_whole(self, blob):
        return self.store.is_whole(blob)

    async def fetch_blob(self, blob, holders, max_bytes):
        self.asked.append(holders)
        if self.faults:
            raise self.faults.pop(0)
        assert max_bytes >= len(DATA)
        self.store.add_bytes(DATA)


def bring(tmp_path, faults=(), spec=SPELLED, net=None):
    said: list[str] = []
    net = net or Net(tmp_path, list(faults))
    run_virtual(fetch_tokenizer(spec, net, said.append))
    return net, said


def test_a_run_without_one_needs_nothing(tmp_path):
    net, said = bring(tmp_path, spec=SPEC)
    assert (net.asked, said) == ([], [])


def test_it_is_asked_of_the_owner_first_and_each_once(tmp_path):
    net, said = bring(tmp_path)
    assert net.asked == [[ME, OTHER]]
    assert said == [FETCHING, ""]
    assert bring(tmp_path, net=net)[1] == []
    assert len(net.asked) == 1, "it is here"


def test_what_fails_is_tried_again_and_said(tmp_path):
    net, said = bring(tmp_path, [Unreachable("x"), TimeoutError(), DiskFault("full"), Unreachable("x")])
    fails = [each for why in (WAITING, WAITING, "full", WAITING) for each in (FETCHING, why)]
    assert said == [*fails, FETCHING, ""]
    assert net.has_blob(BLOB)


def test_a_peer_that_never_answers_does_not_hold_it_up(tmp_path):
    class Mute(Net):
        async def fetch_blob(self, blob, holders, max_bytes):
            if not self.asked:
                self.asked.append(holders)
                await asyncio.sleep(10 * fetching.ATTEMPT_S)
            await super().fetch_blob(blob, holders, max_bytes)

    assert bring(tmp_path, net=Mute(tmp_path, []))[1] == [FETCHING, WAITING, FETCHING, ""]


def test_a_file_that_the_disk_damaged_is_fetched_again(tmp_path):
    net, _ = bring(tmp_path)
    path = net.store.path(BLOB)
    path.write_bytes(b"x" * len(DATA))
    bring(tmp_path, net=net)
    assert path.read_bytes() == DATA
    assert len(net.asked) == 2


def test_a_disk_that_does_not_let_it_be_read_is_waited_for(tmp_path):
    class Stuck(Net):
        stuck = 2

        async def is_whole(self, blob):
            self.stuck -= 1
            if self.stuck >= 0:
                raise DiskFault("cannot be read")
            return await super().is_whole(blob)

    net = Stuck(tmp_path, [])
    net.store.add_bytes(DATA)
    assert bring(tmp_path, net=net)[1] == ["cannot be read", "cannot be read", ""]
    assert net.asked == []


def test_a_file_larger_than_legal_ends_in_one_line(tmp_path):
    with pytest.raises(ConfigError, match="cannot be used"):
        bring(tmp_path, [DecodeError("too large")])
