"""The index of a packed text: the shards of tokens that a run trains on, and the tokens that it validates with.

A shard is `shard_tokens` little-endian token ids: of 1 byte where the vocabulary has at most 256 tokens, of 2
up to 65,536, else of 4. The held-out file has its tokens first, then for each of them the bytes of text that it
stands for, 2 bytes each. All of these are blobs; the index names them, and is itself a blob, which the RunSpec
names as `data.digest`. So a member needs nothing but the run's file to fetch and check whatever it trains on.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from atoll.protocols import codec
from atoll.protocols.errors import DecodeError
from atoll.protocols.ids import DIGEST_BYTES, Digest

INDEX_FILE, TOKENIZER_FILE, HELD_OUT_FILE = "packed.index", "tokenizer.json", "held-out.tokens"
"""Names in the folder of a packed text; its shards are `shard_file`."""
INDEX_VERSION: Literal[1] = 1
MAX_SHARDS = 1 << 16
MAX_SHARD_TOKENS = 1 << 26
MAX_HELD_OUT_TOKENS = 1 << 22
INDEX_MAX_BYTES = MAX_SHARDS * DIGEST_BYTES + 256
SIZE_BYTES = 2
"""Bytes of the size of a held-out token."""
MAX_VOCAB = 1 << 24
_VOCABS = {1: 1 << 8, 2: 1 << 16, 4: MAX_VOCAB}
"""Bytes of a token id, and the largest vocabulary that they are enough for."""


class ShardIndex(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A packed text. All shards have one size, so its blob id and a member's place say what the member reads."""

    version: Literal[1] = INDEX_VERSION
    vocab: Annotated[int, Meta(ge=2, le=MAX_VOCAB)]
    """Every token id is below this."""
    shard_tokens: Annotated[int, Meta(ge=2, le=MAX_SHARD_TOKENS)]
    shards: Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=MAX_SHARDS * DIGEST_BYTES)]
    """Blob ids of the training shards, end to end."""
    held_out: Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
    """Blob id of the held-out file."""
    held_out_tokens: Annotated[int, Meta(ge=2, le=MAX_HELD_OUT_TOKENS)]

    @property
    def count(self) -> int:
        """Number of training shards."""
        return len(self.shards) // DIGEST_BYTES

    @property
    def token_bytes(self) -> int:
        """Bytes of a token id in the files."""
        return next(size for size, vocab in _VOCABS.items() if self.vocab <= vocab)

    @property
    def shard_bytes(self) -> int:
        """Size of each shard's file."""
        return self.shard_tokens * self.token_bytes

    @property
    def held_out_bytes(self) -> int:
        """Size of the held-out file."""
        return self.held_out_tokens * (self.token_bytes + SIZE_BYTES)

    @property
    def total_bytes(self) -> int:
        """Size of all shards and of the held-out file."""
        return self.count * self.shard_bytes + self.held_out_bytes

    def shard(self, at: int) -> Digest:
        """Blob id of shard `at`."""
        return Digest(self.shards[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES])

    @property
    def blobs(self) -> tuple[Digest, ...]:
        """Blob ids of all shards and of the held-out file."""
        return *map(self.shard, range(self.count)), Digest(self.held_out)


def shard_file(at: int) -> str:
    """Name of shard `at` in the folder of a packed text."""
    return f"{at:05d}.tokens"


def decode_index(data: bytes) -> ShardIndex:
    """The index in these bytes, which a peer may have sent. Raises DecodeError."""
    index = codec.decode(data, ShardIndex, max_bytes=INDEX_MAX_BYTES)
    if len(index.shards) % DIGEST_BYTES:
        raise DecodeError(f"shards have {len(index.shards)} bytes, no multiple of {DIGEST_BYTES}")
    return index
