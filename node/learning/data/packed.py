"""Reads windows of a packed text from its shards, which are mapped and not loaded: of any size, in little memory.

Not all shards are here: the daemon fetches those of a round before the round is trained
(node/daemon/assets/run_text.py).
"""

from collections import OrderedDict
from pathlib import Path
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from atoll.p2p.system.atomic_files import disk, read_whole
from atoll.protocols import codec
from atoll.protocols.data.shard_index import INDEX_MAX_BYTES, SIZE_BYTES, ShardIndex, decode_index
from atoll.protocols.data.shard_order import Turn, stretches, windows_a_shard
from atoll.protocols.errors import ConfigError, CorruptFault, DecodeError
from atoll.protocols.ids import Digest, digest
from atoll.protocols.run.run_spec import RunSpec

MAX_MAPPED = 16
"""Shards that stay mapped; a round needs one or two."""


class PackedText:
    """A packed text in a folder of blobs: windows `[B, T + 1]`, int64, of those shards that are here."""

    def __init__(self, index: ShardIndex, folder: Path, context: int) -> None:
        """Raises ConfigError for shards shorter than a window, CorruptFault, DiskFault without held-out tokens."""
        self._index, self._folder, self._context = index, folder, context
        self._per = windows_a_shard(index, context)
        self._token = np.dtype(f"<u{index.token_bytes}")
        self._mapped = OrderedDict[int, NDArray[np.unsignedinteger]]()
        self._lock = Lock()
        """Of `_mapped`: an audit may read windows while a thread loads those of the next step."""
        if not self._per or index.held_out_tokens <= context:
            raise ConfigError(
                f"the packed text has shards of {index.shard_tokens} and {index.held_out_tokens} held-out tokens, "
                f"too few for windows of {context}",
                hint="pack more text, or train with a smaller model.context",
            )
        held_out = self._map(Digest(index.held_out), index.held_out_bytes)
        split = index.held_out_tokens * index.token_bytes
        self._val_N = self._checked(held_out[:split].view(self._token), "the held-out file")
        self._val_bytes_N = held_out[split:].view(f"<u{SIZE_BYTES}")

    @property
    def digest(self) -> Digest:
        """BLAKE3 of the index, which names all shards."""
        return digest(codec.encode(self._index))

    @property
    def num_windows(self) -> int:
        """Number of training windows, of all shards."""
        return self._index.count * self._per

    def windows_of(self, spec: RunSpec, turn: Turn, at_W: NDArray[np.int64]) -> NDArray[np.int64]:
        """Indices `[W]`, int64, of the windows with these numbers, from 0, of a member's turn."""
        parts = list(stretches(spec, self._index, turn, int(at_W.max(initial=-1)) + 1))
        found = [each.shard * self._per + each.first + np.arange(each.windows) for each in parts]
        windows_W: NDArray[np.int64] = np.concatenate([np.empty(0, np.int64), *found])
        return windows_W[at_W]

    def windows_beside(self, at_W: NDArray[np.int64], rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """Indices `[count]`, int64, of windows that `rng` draws from the shards of these."""
        shard_W: NDArray[np.int64] = rng.choice(at_W, count) // self._per
        return shard_W * self._per + rng.integers(0, self._per, count)

    def batch(self, windows_B: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens `[B, T + 1]`, int64, of training windows. Raises CorruptFault, DiskFault."""
        out_BT1 = np.empty((len(windows_B), self._context + 1), np.int64)
        for row, window in enumerate(windows_B.tolist()):
            shard, inside = divmod(window, self._per)
            first = inside * self._context
            out_BT1[row] = self._shard(shard)[first : first + self._context + 1]
        return out_BT1

    def validation(self, limit: int) -> NDArray[np.int64]:
        """At most `limit` windows `[W, T + 1]`, int64, evenly spread over the held-out text; always the same."""
        return self._cut(self._val_N, limit)

    def validation_bytes(self, limit: int) -> int:
        """Bytes of text of the predicted tokens of these windows: all but the first of each."""
        return int(self._cut(self._val_bytes_N, limit)[:, 1:].sum())

    def _cut(self, values_N: NDArray[np.unsignedinteger], limit: int) -> NDArray[np.int64]:
        count = (len(values_N) - 1) // self._context
        windows_W = np.arange(min(limit, count), dtype=np.int64) * count // min(limit, count)
        at_WT1 = windows_W[:, None] * self._context + np.arange(self._context + 1)
        found: NDArray[np.int64] = values_N[at_WT1].astype(np.int64)
        return found

    def _shard(self, at: int) -> NDArray[np.unsignedinteger]:
        with self._lock:
            if at not in self._mapped:
                data = self._map(self._index.shard(at), self._index.shard_bytes)
                self._mapped[at] = self._checked(data.view(self._token), f"shard {at}")
                if len(self._mapped) > MAX_MAPPED:
                    self._mapped.popitem(last=False)
            self._mapped.move_to_end(at)
            return self._mapped[at]

    def _map(self, blob: Digest, size: int) -> NDArray[np.uint8]:
        path = self._path(blob)
        with disk(path):
            found = np.memmap(path, np.uint8, "r")
        if len(found) != size:
            raise CorruptFault(
                f"{path} has {len(found)} bytes of {size}", hint="delete it: it is fetched again from its holders"
            )
        return found

    def _checked(self, tokens_N: NDArray[np.unsignedinteger], what: str) -> NDArray[np.unsignedinteger]:
        # Its hash is right, so whoever packed it wrote that: an embedding has no row for it, and a GPU ends the
        # process.
        if int(tokens_N.max()) >= self._index.vocab:
            raise ConfigError(f"{what} of the packed text has tokens above its vocabulary", hint="ask its owner")
        return tokens_N

    def _path(self, blob: Digest) -> Path:
        return self._folder / f"{blob.hex()}.blob"


def open_packed(spec: RunSpec, folder: Path) -> PackedText:
    """The packed text of a run, whose index and held-out file are blobs in `folder`.

    Raises ConfigError, CorruptFault, DiskFault.
    """
    name = spec.data.index
    assert name is not None, "its text is packed"
    data = read_whole(folder / f"{name.hex()}.blob", max_bytes=INDEX_MAX_BYTES)
    if data is None:
        raise ConfigError("the packed text of this run is not in this home", hint="start the node: it fetches it")
    try:
        index = decode_index(data)
    except DecodeError as error:
        raise ConfigError(f"the packed text of this run cannot be used: {error}", hint="ask its owner") from error
    if spec.data.size and spec.data.size != index.total_bytes:
        raise ConfigError(
            f"the packed text has {index.total_bytes} bytes, and the run says {spec.data.size}",
            hint="ask its owner",
        )
    if index.vocab > spec.model.vocab:
        raise ConfigError(
            f"the packed text has {index.vocab} tokens in its vocabulary, the model {spec.model.vocab}",
            hint="make the run with --data and without a change of model.vocab",
        )
    return PackedText(index, folder, spec.model.context)
