"""Shards of a packed text: fetched when a turn needs them, kept while they fit, and deleted by nobody else."""

import asyncio

import pytest
from msgspec.structs import replace

from atoll.node.daemon.assets import fetching
from atoll.node.daemon.assets.run_files import RoundFiles
from atoll.node.daemon.assets.run_text import RunText
from atoll.node.daemon.core.interfaces import RunContext
from atoll.p2p.blobs.store import BlobStore
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols import codec
from atoll.protocols.blobs import manifest_of_bytes
from atoll.protocols.data.shard_index import HELD_OUT_FILE, INDEX_FILE, ShardIndex, shard_file
from atoll.protocols.data.shard_order import Turn, shards_of
from atoll.protocols.errors import ConfigError, DecodeError, Unreachable
from tests.node.worker.session_home import ME, OTHER, SPEC

CONTEXT, COUNT = SPEC.model.context, 12
TOKENS = 4 * CONTEXT + 1
DATA = [bytes([at]) * TOKENS for at in range(COUNT)]
HELD_OUT = bytes(3 * (2 * CONTEXT))


def blob_of(data):
    return manifest_of_bytes(data).id


INDEX = ShardIndex(
    vocab=256,
    shard_tokens=TOKENS,
    shards=b"".join(map(blob_of, DATA)),
    held_out=blob_of(HELD_OUT),
    held_out_tokens=2 * CONTEXT,
)
FILES = {blob_of(data): data for data in (codec.encode(INDEX), HELD_OUT, *DATA)}
NAME = blob_of(codec.encode(INDEX))
PACKED = replace(SPEC, data=replace(SPEC.data, source="packed:words", digest=NAME))


class Net:
    """A store, and peers that fail in order before they give a file."""

    def __init__(self, folder, faults=()):
        self.store, self.faults, self.asked = BlobStore(folder), list(faults), []

    def has_blob(self, blob):
        return self.store.has(blob)

    def blob_path(self, blob):
        return self.store.path(blob)

    def add_blob(self, path, *, move=False):
        return self.store.add_file(path, move=move)

    def delete_blob(self, blob):
        self.store.delete(blob)

    def neighbours(self):
        return [OTHER]

    async def is_whole(self, blob):
        return self.store.is_whole(blob)

    async def fetch_blob(self, blob, holders, max_bytes):
        if self.faults:
            raise self.faults.pop(0)
        assert len(FILES[blob]) <= max_bytes
        await asyncio.sleep(1.0)
        if not self.store.has(blob):
            self.asked.append(blob)
            self.store.add_bytes(FILES[blob])


def text_of(net, spec=PACKED, **options):
    return RunText(RunContext(spec, ME, None, lambda: 0.0), net, **options)


def needed(number, spec=PACKED):
    return [INDEX.shard(at) for at in shards_of(spec, INDEX, Turn(number, ME))]


def test_a_text_that_is_not_packed_needs_nothing(tmp_path):
    async def story():
        net, said = Net(tmp_path), []
        text = text_of(net, SPEC)
        await text.begin(said.append)
        assert not await text.prepare(Turn(3, ME), said.append)
        assert (net.asked, said) == ([], [])

    run_virtual(story())


def test_a_turns_shards_are_fetched_once_and_no_others(tmp_path):
    async def story():
        net, said = Net(tmp_path, [Unreachable("x")]), []
        text = text_of(net)
        await text.begin(said.append)
        assert net.asked == [NAME, blob_of(HELD_OUT)]
        fetching, waiting = "fetching the packed text", "waiting for the packed text: nobody reachable has it yet"
        assert said == [fetching, waiting, fetching, "", fetching, ""]
        said.clear()
        assert await text.prepare(Turn(3, ME), said.append)
        assert net.asked[2:] == needed(3)
        assert said[0] == f"fetching shard 1 of {len(needed(3))} of the round's text"
        assert said[-1] == ""
        assert not await text.prepare(Turn(3, ME), said.append), "they are here"

    run_virtual(story())


def test_shards_beyond_the_limit_go_and_those_in_use_stay(tmp_path):
    async def story():
        net = Net(tmp_path)
        text = text_of(net, limit_bytes=4 * INDEX.shard_bytes)
        await text.begin(lambda reason: None)
        for number in range(40):
            await text.prepare(Turn(number, ME), lambda reason: None)
            assert all(map(net.has_blob, needed(number)))
            here = [blob for blob in map(INDEX.shard, range(COUNT)) if net.has_blob(blob)]
            assert len(here) <= max(4, len(needed(number)))
        assert len(set(net.asked)) > 6, "it came by more shards than it may keep"

    run_virtual(story())


def test_who_has_all_keeps_all_for_the_others(tmp_path):
    async def story():
        folder = tmp_path / "packed"
        folder.mkdir()
        for name, data in [(INDEX_FILE, codec.encode(INDEX)), (HELD_OUT_FILE, HELD_OUT)]:
            (folder / name).write_bytes(data)
        for at, data in enumerate(DATA):
            (folder / shard_file(at)).write_bytes(data)
        net = Net(tmp_path / "blobs")
        text = text_of(net, limit_bytes=INDEX.shard_bytes, folder=folder)
        await text.begin(lambda reason: None)
        for number in range(20):
            await text.prepare(Turn(number, ME), lambda reason: None)
        assert net.asked == []
        assert all(map(net.has_blob, FILES))
        (folder / shard_file(3)).write_bytes(b"x" * TOKENS)
        with pytest.raises(ConfigError, match="damaged"):
            await text_of(Net(tmp_path / "other"), folder=folder).begin(lambda reason: None)
        other = replace(PACKED, data=replace(PACKED.data, digest=bytes(32)))
        with pytest.raises(ConfigError, match="not the packed text of this run"):
            await text_of(Net(tmp_path / "third"), other, folder=folder).begin(lambda reason: None)

    run_virtual(story())


def test_shards_are_kept_from_the_start_of_a_node_that_has_the_index(tmp_path):
    """The driver deletes large blobs that it does not know before anything is fetched."""
    net = Net(tmp_path)
    for blob in (NAME, *INDEX.blobs[:2]):
        net.store.add_bytes(FILES[blob])
    context = RunContext(PACKED, ME, None, lambda: 0.0)
    RunText(context, net)
    assert {NAME, *INDEX.blobs} <= context.kept


@pytest.mark.parametrize(
    "index",
    [b"no index", codec.encode(replace(INDEX, shard_tokens=CONTEXT))],
)
def test_an_index_that_is_none_is_the_owners_fault(tmp_path, index):
    async def story():
        net = Net(tmp_path)
        net.store.add_bytes(index)
        spec = replace(PACKED, data=replace(PACKED.data, digest=blob_of(index)))
        with pytest.raises(ConfigError) as caught:
            await text_of(net, spec).begin(lambda reason: None)
        assert "owner" in (caught.value.hint or "")

    run_virtual(story())


def test_a_shard_larger_than_legal_is_the_owners_fault(tmp_path):
    async def story():
        net = Net(tmp_path)
        text = text_of(net)
        await text.begin(lambda reason: None)
        net.faults = [DecodeError("too large")]
        with pytest.raises(ConfigError, match="cannot be used"):
            await text.prepare(Turn(3, ME), lambda reason: None)

    run_virtual(story())


def test_the_next_rounds_shards_come_while_this_one_is_trained(tmp_path):
    async def story():
        net, tasks = Net(tmp_path), []
        text = text_of(net)
        await text.begin(lambda reason: None)
        context = RunContext(PACKED, ME, None, lambda: 0.0)
        files = RoundFiles(
            context=context, net=net, text=text, start_task=lambda work, name: tasks.append((work, name))
        )
        await files.prepare(Turn(3, ME), (), lambda reason: None)
        [(work, name)] = tasks
        assert name == "shards 4"
        await work
        assert not await text.prepare(Turn(4, ME), lambda reason: None)
        last = PACKED.outer.rounds - 1
        await files.prepare(Turn(last, ME), (), lambda reason: None)
        assert len(tasks) == 1, "no round follows the last one"

    run_virtual(story())


def test_it_is_asked_for_again_and_again(tmp_path):
    async def story():
        net = Net(tmp_path, [Unreachable("x")] * 5)
        began = asyncio.get_running_loop().time()
        await text_of(net).begin(lambda reason: None)
        assert asyncio.get_running_loop().time() - began == pytest.approx(5 * fetching.RETRY_S + 2, abs=0.1)

    run_virtual(story())


def test_a_seeder_fetches_all_and_keeps_all(tmp_path):
    async def story():
        net = Net(tmp_path, [])
        text = text_of(net, limit_bytes=INDEX.shard_bytes)
        await text.begin(lambda reason: None)
        await text.prepare(Turn(0, ME), lambda reason: None)
        net.faults = [Unreachable("x")] * 2
        async with asyncio.TaskGroup() as group:
            holding = group.create_task(text.hold_all())
            await text.prepare(Turn(7, ME), lambda reason: None)
            await holding
        await text.prepare(Turn(9, ME), lambda reason: None)
        assert all(map(net.has_blob, FILES))
        assert len(net.asked) == len(set(net.asked)), "each once"

    run_virtual(story())


def test_a_damaged_index_is_fetched_again(tmp_path):
    async def story():
        net = Net(tmp_path)
        net.store.add_bytes(FILES[NAME])
        path = net.store.path(NAME)
        path.chmod(0o600)
        path.write_bytes(b"\0" * len(FILES[NAME]))
        await text_of(net).begin(lambda reason: None)
        assert net.asked[0] == NAME
        assert path.read_bytes() == FILES[NAME]

    run_virtual(story())


def test_a_leaving_node_asks_about_a_few_shards_that_are_spread_over_the_text(tmp_path):
    net = Net(tmp_path / "blobs")
    text = RunText(RunContext(PACKED, ME, None, None), net)
    assert text.shards_here(4) == (), "its index is not known"

    async def story():
        await text.begin(lambda reason: None)
        assert text.shards_here(4) == ()
        await text.hold_all()

    run_virtual(story())
    names = [INDEX.shard(at) for at in range(COUNT)]
    assert text.shards_here(COUNT) == tuple(names)
    assert text.shards_here(4) == tuple(names[::3])
    assert len(text.shards_here(5)) <= 5
