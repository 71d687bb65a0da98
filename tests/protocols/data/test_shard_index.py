"""The index of a packed text: what it says of its files, and that nothing else is read as one."""

import pytest
from msgspec.structs import replace

from atoll.protocols import codec
from atoll.protocols.data.shard_index import INDEX_MAX_BYTES, MAX_SHARDS, ShardIndex, decode_index
from atoll.protocols.errors import DecodeError
from atoll.protocols.ids import digest

SHARDS = [digest(bytes([at])) for at in range(5)]
INDEX = ShardIndex(
    vocab=256, shard_tokens=1000, shards=b"".join(SHARDS), held_out=digest(b"held out"), held_out_tokens=300
)


def test_it_names_each_file_and_its_size():
    assert [INDEX.shard(at) for at in range(INDEX.count)] == SHARDS
    assert INDEX.blobs == (*SHARDS, digest(b"held out"))
    for vocab, width in ((256, 1), (257, 2), (65536, 2), (65537, 4)):
        index = replace(INDEX, vocab=vocab)
        assert (index.shard_bytes, index.held_out_bytes) == (1000 * width, 300 * (width + 2))


def test_it_comes_back_as_it_was():
    assert decode_index(codec.encode(INDEX)) == INDEX


@pytest.mark.parametrize(
    "change",
    [
        {"shards": INDEX.shards[:-1]},
        {"shards": b""},
        {"held_out": b"\0" * 31},
        {"vocab": 1},
        {"shard_tokens": 1},
        {"shard_tokens": (1 << 26) + 1},
        {"held_out_tokens": (1 << 22) + 1},
        {"version": 2},
    ],
)
def test_an_illegal_one_is_refused(change):
    with pytest.raises(DecodeError):
        decode_index(codec.encode(replace(INDEX, **change)))


def test_the_largest_legal_one_is_read_and_no_larger_one():
    largest = replace(INDEX, shards=bytes(32) * MAX_SHARDS, vocab=1 << 24, shard_tokens=1 << 26)
    assert len(codec.encode(largest)) <= INDEX_MAX_BYTES
    assert decode_index(codec.encode(largest)).count == MAX_SHARDS
    with pytest.raises(DecodeError):
        decode_index(bytes(INDEX_MAX_BYTES + 1))
