"""A packed text gives the windows that its index names, wherever the shards come from, and trusts no token id."""

import numpy as np
import pytest
from msgspec.structs import replace

from atoll.node.learning.data.dataset import open_text
from atoll.node.learning.data.packed import MAX_MAPPED, PackedText, open_packed
from atoll.node.runs.presets import preset
from atoll.p2p.blobs.store import BlobStore
from atoll.protocols import codec
from atoll.protocols.data.shard_index import ShardIndex
from atoll.protocols.data.shard_order import Turn, most_windows, shards_of, stretches, windows_a_shard
from atoll.protocols.errors import ConfigError, CorruptFault, DiskFault
from tests.node.worker.session_home import ME

CONTEXT, COUNT, TOKENS = 8, 20, 8 * 30 + 3
SHARDS = [np.random.default_rng(at).integers(0, 300, TOKENS).astype("<u2") for at in range(COUNT)]
VAL_N = np.arange(100, dtype="<u2")
SIZES_N = np.arange(100, dtype="<u2") % 7
SPEC = preset("tiny", ME, 7)
SPEC = replace(SPEC, model=replace(SPEC.model, context=CONTEXT, vocab=300))


@pytest.fixture
def made(tmp_path):
    def make(shards=SHARDS, **changes):
        store = BlobStore(tmp_path)
        index = ShardIndex(
            vocab=300,
            shard_tokens=TOKENS,
            shards=b"".join(store.add_bytes(each.tobytes()) for each in shards),
            held_out=store.add_bytes(VAL_N.tobytes() + SIZES_N.tobytes()),
            held_out_tokens=len(VAL_N),
        )
        index = replace(index, **changes)
        name = store.add_bytes(codec.encode(index))
        spec = replace(SPEC, data=replace(SPEC.data, source="packed:words", digest=name))
        return spec, index, store, tmp_path

    return make


def test_windows_are_those_of_the_shards(made):
    spec, index, _, folder = made()
    text = open_text(spec, "", folder, folder)
    per = windows_a_shard(index, CONTEXT)
    assert text.num_windows == COUNT * per
    for shard in range(COUNT):
        for at in (0, per - 1):
            found = text.batch(np.array([shard * per + at]))
            assert found.dtype == np.int64
            assert np.array_equal(found[0], SHARDS[shard][at * CONTEXT : (at + 1) * CONTEXT + 1])


def test_a_turn_has_the_windows_of_its_stretches(made):
    spec, index, _, folder = made()
    text = open_packed(spec, folder)
    turn = Turn(5, ME, 1, 3)
    per = windows_a_shard(index, CONTEXT)
    parts = stretches(spec, index, turn, 50)
    named = [each.shard * per + each.first + at for each in parts for at in range(each.windows)]
    assert text.windows_of(spec, turn, np.arange(50)).tolist() == named
    assert text.windows_of(spec, turn, np.array([7, 3])).tolist() == [named[7], named[3]]
    most = text.windows_of(spec, turn, np.arange(most_windows(spec, 5)))
    assert set((most // per).tolist()) == set(shards_of(spec, index, turn))


def test_windows_beside_some_are_of_their_shards(made):
    spec, index, store, folder = made()
    text, per = open_packed(spec, folder), windows_a_shard(index, CONTEXT)
    for at in range(COUNT):
        if at not in (3, 11):
            store.delete(index.shard(at))
    drawn = text.windows_beside(np.array([3 * per, 11 * per + 1]), np.random.default_rng(1), 100)
    assert {window // per for window in drawn.tolist()} == {3, 11}
    text.batch(drawn)
    with pytest.raises(DiskFault):
        text.batch(np.array([0]))


def test_few_shards_stay_mapped(made):
    spec, index, _, folder = made()
    text = open_packed(spec, folder)
    text.batch(np.arange(COUNT) * windows_a_shard(index, CONTEXT))
    assert len(text._mapped) == MAX_MAPPED < COUNT


def test_validation_is_spread_over_the_held_out_tokens(made):
    spec, _, _, folder = made()
    text = open_packed(spec, folder)
    assert np.array_equal(text.validation(2)[0], VAL_N[: CONTEXT + 1])
    assert len(text.validation(1000)) == 99 // CONTEXT
    assert text.validation_bytes(1) == SIZES_N[1 : CONTEXT + 1].sum()


def test_a_token_above_the_vocabulary_is_refused(made):
    bad = [each.copy() for each in SHARDS]
    bad[2][77] = 300
    spec, index, _, folder = made(bad)
    text = open_packed(spec, folder)
    text.batch(np.array([0]))
    with pytest.raises(ConfigError, match="above its vocabulary"):
        text.batch(np.array([2 * windows_a_shard(index, CONTEXT)]))


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"shard_tokens": CONTEXT}, ConfigError),
        ({"held_out_tokens": CONTEXT}, ConfigError),
        ({"held_out_tokens": 99}, CorruptFault),
        ({"vocab": 301}, ConfigError),
    ],
)
def test_what_does_not_fit_the_run_is_refused(changes, fault, made):
    spec, _, _, folder = made(**changes)
    with pytest.raises(fault):
        open_packed(spec, folder)


def test_the_size_that_the_run_says_is_that_of_the_files(made):
    spec, index, _, folder = made()
    said = sum((folder / f"{blob.hex()}.blob").stat().st_size for blob in index.blobs)
    open_packed(replace(spec, data=replace(spec.data, size=said)), folder)
    with pytest.raises(ConfigError, match=f"has {said} bytes, and the run says {said - 1}"):
        open_packed(replace(spec, data=replace(spec.data, size=said - 1)), folder)


def test_a_home_without_it_says_so(made, tmp_path):
    spec, _, _, _ = made()
    with pytest.raises(ConfigError, match="not in this home"):
        open_packed(spec, tmp_path / "other")


def test_a_shard_of_another_size_is_damaged(made):
    _, index, _, folder = made()
    text = PackedText(replace(index, shard_tokens=TOKENS + 1), folder, CONTEXT)
    with pytest.raises(CorruptFault):
        text.batch(np.array([0]))
