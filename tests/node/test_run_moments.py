"""The moments of a checkpoint are waited for before round 0, for a while, and never needed."""

from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from atoll.node import run_moments
from atoll.node.needs import moments_max_bytes
from atoll.node.run_moments import bring_moments
from atoll.p2p.blobs.store import BlobStore
from atoll.p2p.transports.virtual_time import run_virtual
from atoll.protocols.blobs import manifest_of_bytes
from atoll.protocols.errors import ConfigError, DecodeError, DiskFault, Unreachable
from atoll.protocols.model import ExpertsSpec
from atoll.protocols.moments import file_count, file_of, file_of_expert, files_for
from atoll.protocols.run import StartSpec
from tests.node.session_home import ME, OTHER, SPEC

DATA = b"moments" * 1000
BLOB = manifest_of_bytes(DATA).id
GIVEN = replace(SPEC, start=StartSpec(weights=bytes(32), state=bytes(32), moments=BLOB))
MIXTURE_MODEL = replace(SPEC.model, experts=ExpertsSpec(count=8, per_token=1, ffn=64))
FILES = [manifest_of_bytes(bytes([number])).id for number in range(9)]
MIXTURE = replace(
    SPEC, model=MIXTURE_MODEL, start=StartSpec(weights=bytes(32), state=bytes(32), moments=b"".join(FILES))
)
WAITING = "waiting for the moments of the run's checkpoint: nobody reachable has them yet"


class Net:
    """A store, peers that fail in order before they give the file, and what they say of themselves."""

    def __init__(self, folder, faults=(), rounds=(), has_begun=False):
        self.store, self.faults = BlobStore(folder), list(faults)
        self.rounds, self.has_begun = rounds, has_begun
        self.asked = []

    def has_blob(self, blob):
        return self.store.has(blob)

    def neighbours(self):
        return [OTHER, ME]

    def leases(self):
        return {str(number): (SimpleNamespace(round=number), 9.0) for number in self.rounds}

    async def fetch_blob(self, blob, holders, max_bytes):
        self.asked.append(holders)
        if self.faults:
            raise self.faults.pop(0)
        assert max_bytes >= 12 * SPEC.model.parameters
        self.store.add_bytes(DATA)


class Several(Net):
    """Gives a file of its own for each blob, and remembers which were asked for."""

    async def fetch_blob(self, blob, holders, max_bytes):
        self.asked.append((FILES.index(blob), max_bytes))
        if self.faults:
            raise self.faults.pop(0)
        self.store.add_bytes(bytes([FILES.index(blob)]))


def bring(net, spec=GIVEN, files=(0,)):
    said = []
    run_virtual(bring_moments(spec, files, net, said.append, lambda: net.has_begun))
    return said


def test_only_what_is_needed_is_fetched_and_each_file_once(tmp_path):
    net = Several(tmp_path, [Unreachable("x")])
    assert bring(net, MIXTURE, (0, 3)) == [WAITING, ""]
    assert [number for number, _ in net.asked] == [0, 0, 3]
    assert bring(net, MIXTURE, (0, 2, 3)) == []
    assert [number for number, _ in net.asked[3:]] == [2]
    sizes = dict(net.asked)
    expert = 12 * 3 * 64 * 64
    assert expert <= sizes[2] == sizes[3] < expert + 20_000
    assert sum(moments_max_bytes(MIXTURE, number) for number in range(9)) >= 12 * MIXTURE.model.parameters


def test_they_are_asked_of_the_owner_first(tmp_path):
    net = Net(tmp_path)
    assert bring(net) == []
    assert net.asked == [[ME, OTHER]]
    assert net.has_blob(BLOB)
    assert bring(net) == []
    assert len(net.asked) == 1


def test_a_run_without_them_asks_nobody(tmp_path):
    for spec in (SPEC, replace(GIVEN, start=replace(GIVEN.start, moments=b""))):
        net = Net(tmp_path)
        assert bring(net, spec) == []
        assert net.asked == []


def test_faults_are_said_and_tried_again(tmp_path):
    net = Net(tmp_path, [Unreachable("x"), DiskFault("full"), DecodeError("x"), TimeoutError()])
    assert bring(net) == [WAITING, WAITING.replace("nobody reachable has them yet", "full"), WAITING, WAITING, ""]
    assert net.has_blob(BLOB)


def test_nobody_is_waited_for_without_end(tmp_path):
    net = Net(tmp_path, [Unreachable("x")] * 1000)
    said = bring(net)
    assert set(said) == {WAITING, ""}
    assert len(net.asked) == run_moments.PATIENCE_S / run_moments.RETRY_S


def test_when_round_0_is_over_they_are_not_wanted(tmp_path):
    for net in (Net(tmp_path, rounds=[0, 3]), Net(tmp_path, has_begun=True)):
        assert bring(net) == []
        assert net.asked == []
    assert bring(begins := Net(tmp_path, rounds=[0, 0])) == []
    assert len(begins.asked) == 1


def test_they_are_named_by_a_hash_or_not_at_all():
    GIVEN.check()
    assert GIVEN.given == (bytes(32), BLOB)
    with pytest.raises(ConfigError, match=r"start\.moments"):
        replace(GIVEN, start=replace(GIVEN.start, moments=b"x")).check()
    MIXTURE.check()
    assert MIXTURE.given == (bytes(32), *FILES)
    with pytest.raises(ConfigError, match="32 bytes for each of 9 files"):
        replace(MIXTURE, start=GIVEN.start).check()


def test_a_file_for_each_expert_or_for_a_group_of_them():
    for count in (1, 8, 255, 256, 300, 4096):
        model = replace(SPEC.model, experts=ExpertsSpec(count=count, per_token=1, ffn=64))
        files = [file_of_expert(model, expert) for expert in range(count)]
        assert files == sorted(files)
        assert set(files) == set(range(1, file_count(model)))
        sizes = [files.count(number) for number in set(files)]
        assert max(sizes) - min(sizes) <= 1
    assert file_count(SPEC.model) == 1
    assert files_for(SPEC.model, ()) == (0,)
    assert files_for(MIXTURE_MODEL, (7, 2)) == (0, 3, 8)
    assert file_of(MIXTURE_MODEL, "model.layers.0.mlp.experts.2.up_proj.weight") == 3
    assert file_of(MIXTURE_MODEL, "model.norm.weight") == 0
