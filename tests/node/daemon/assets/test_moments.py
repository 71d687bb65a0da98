"""The moments of a checkpoint are waited for before round 0, for a while, and never needed."""

import asyncio
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from atoll.node.daemon.assets import moments as run_moments
from atoll.node.daemon.assets.moments import fetch_moments
from atoll.p2p.blobs.store import BlobStore
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.blobs import manifest_of_bytes
from atoll.protocols.errors import ConfigError, DecodeError, DiskFault, Unreachable
from atoll.protocols.run.bounds import moments_max_bytes
from atoll.protocols.run.model_spec import ExpertsSpec
from atoll.protocols.run.moments import file_count, file_of, file_of_expert, files_for
from atoll.protocols.run.run_spec import StartSpec
from tests.node.worker.session_home import ME, OTHER, SPEC

DATA = b"moments" * 1000
BLOB = manifest_of_bytes(DATA).id
GIVEN = replace(SPEC, start=StartSpec(weights=bytes(32), state=bytes(32), moments=BLOB))
MIXTURE_MODEL = replace(SPEC.model, experts=ExpertsSpec(count=8, per_token=1, ffn=64))
FILES = [manifest_of_bytes(bytes([number])).id for number in range(9)]
MIXTURE = replace(
    SPEC, model=MIXTURE_MODEL, start=StartSpec(weights=bytes(32), state=bytes(32), moments=b"".join(FILES))
)
FETCHING = "fetching the moments of the run's checkpoint: file 1 of 1"
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
        return {str(peer): (SimpleNamespace(round=at), 9.0) for peer, at in enumerate(self.rounds)}

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
    run_virtual(fetch_moments(spec, files, net, said.append, lambda: net.has_begun))
    return said


def test_only_what_is_needed_is_fetched_and_each_file_once(tmp_path):
    net = Several(tmp_path, [Unreachable("x")])
    first, second = FETCHING.replace("of 1", "of 2"), FETCHING.replace("1 of 1", "2 of 2")
    assert bring(net, MIXTURE, (0, 3)) == [first, WAITING, first, second, ""]
    assert [number for number, _ in net.asked] == [0, 0, 3]
    assert bring(net, MIXTURE, (0, 2, 3)) == [FETCHING, ""]
    assert [number for number, _ in net.asked[3:]] == [2]
    sizes = dict(net.asked)
    expert = 12 * 3 * 64 * 64
    assert expert <= sizes[2] == sizes[3] < expert + 20_000
    assert sum(moments_max_bytes(MIXTURE, number) for number in range(9)) >= 12 * MIXTURE.model.parameters


def test_they_are_asked_of_the_owner_first(tmp_path):
    net = Net(tmp_path)
    assert bring(net) == [FETCHING, ""]
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
    nobody = "nobody reachable has them yet"
    waits = [WAITING.replace(nobody, why) for why in (nobody, "full", nobody, "file 1 of 1 comes slowly")]
    assert bring(net) == [line for wait in waits for line in (FETCHING, wait)] + [FETCHING, ""]
    assert net.has_blob(BLOB)


def test_nobody_is_waited_for_without_end(tmp_path):
    net = Net(tmp_path, [Unreachable("x")] * 1000)
    said = bring(net)
    assert set(said) == {FETCHING, WAITING, ""}
    assert abs(len(net.asked) - run_moments.PATIENCE_S / run_moments.RETRY_S) <= 1


class Hanging(Net):
    """Whoever is asked says nothing; after 30 s `happens` changes what is known of the others."""

    def __init__(self, folder, happens=lambda _: None):
        super().__init__(folder)
        self.happens, self.given_up = happens, 0

    async def fetch_blob(self, blob, holders, max_bytes):
        self.asked.append(holders)
        try:
            await asyncio.sleep(1e9)
        finally:
            self.given_up += 1

    def bring_s(self):
        said = []

        async def timed():
            now = asyncio.get_running_loop().time
            asyncio.get_running_loop().call_later(30.0, self.happens, self)
            began = now()
            await fetch_moments(GIVEN, (0,), self, said.append, lambda: self.has_begun)
            return now() - began

        took_s = run_virtual(timed())
        assert (said[0], said[-1]) == (FETCHING, "")
        assert self.given_up == len(self.asked) > 0
        return took_s


def all_go_on(net):
    net.rounds = [1, 2]


def one_goes_on(net):
    net.rounds = [0, 2]


def it_begins(net):
    net.has_begun = True


def test_a_fetch_under_way_is_given_up_when_it_is_too_late_or_takes_too_long(tmp_path):
    for happens in (all_go_on, it_begins):
        assert Hanging(tmp_path, happens).bring_s() == pytest.approx(30.0, abs=run_moments.POLL_S)
    for happens in (one_goes_on, lambda _: None):
        took_s = Hanging(tmp_path, happens).bring_s()
        assert took_s == pytest.approx(run_moments.PATIENCE_S, abs=run_moments.POLL_S + 0.1)


def test_when_round_0_is_over_they_are_not_wanted(tmp_path):
    for net in (Net(tmp_path, rounds=[0, 3, 3]), Net(tmp_path, has_begun=True)):
        assert bring(net) == []
        assert net.asked == []
    for number, rounds in enumerate(([0, 0], [0, 3])):  # one of them may say what it likes
        begins = Net(tmp_path / str(number), rounds=rounds)
        assert bring(begins) == [FETCHING, ""]
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
