"""Tokenizers: `bytes` (256 tokens), `bpe8k` (8192 tokens, trained from the run's own text), `file` (given.py).

Every member trains the BPE itself. Its bytes are part of the run's data digest, so a member whose library trains
another one is refused before it sends anything. What a text became is kept from one start to the next
(`keep_tokens`): for 5 MB of text and `bpe8k` that is 4 s of CPU.
"""

import io
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from atoll.p2p.system.atomic_files import open_file, write_whole
from atoll.protocols.errors import ConfigError, DiskFault
from atoll.protocols.ids import Digest, digest

BPE_VOCAB = 8192
BYTES_VOCAB = 256
_TRAIN_MAX_BYTES = 16 << 20
_BLOCK_BYTES = 1 << 16
KEPT_MOST_BYTES: Final = 64 << 20
"""Largest file of kept tokens: of 128 MB of text. Larger ones are better packed (pack.py)."""
_KEPT: Final = b"atoll kept tokens/1"
_CHECK_BYTES: Final = 32


class Tokens(NamedTuple):
    """The tokens of a run's text, int32."""

    identity: bytes
    """Of their tokenizer."""
    train_N: NDArray[np.int32]
    val_N: NDArray[np.int32]
    val_bytes_N: NDArray[np.int32]
    """Bytes of text that each validation token stands for."""


class TextTokenizer(Protocol):
    """Turns text into token ids."""

    identity: bytes
    """Serialised tokenizer, part of the data digest; empty for `bytes`."""

    def encode(self, text: bytes) -> NDArray[np.int32]:
        """Token ids `[N]` of a text, int32."""
        ...

    def encode_each(self, texts: list[bytes]) -> list[NDArray[np.int32]]:
        """Token ids `[N]` of each of these texts, on all cores; a text has at most 64 KiB."""
        ...

    def encode_sized(self, text: bytes) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Token ids `[N]` and the bytes of text that each stands for `[N]`, which turn nats into bits per byte."""
        ...


class ByteTokenizer:
    """The tokenizer `bytes`: every byte is a token."""

    identity = b""

    def encode(self, text: bytes) -> NDArray[np.int32]:
        """One token id for each byte."""
        return np.frombuffer(text, np.uint8).astype(np.int32)

    def encode_each(self, texts: list[bytes]) -> list[NDArray[np.int32]]:
        """One token id for each byte of each text."""
        return list(map(self.encode, texts))

    def encode_sized(self, text: bytes) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """One token id for each byte, all of size 1."""
        return self.encode(text), np.ones(len(text), np.int32)


class SubwordTokenizer:
    """A tokenizer of the `tokenizers` library. It never adds special tokens."""

    def __init__(self, tokenizer: Tokenizer, identity: bytes) -> None:
        self._tokenizer = tokenizer
        self.identity = identity

    def encode(self, text: bytes) -> NDArray[np.int32]:
        """Token ids `[N]`. Invalid UTF-8 becomes the replacement character."""
        blocks = _blocks(text.decode("utf-8", "replace"), _BLOCK_BYTES)
        found = self._tokenizer.encode_batch_fast(blocks, add_special_tokens=False)
        return _joined([np.array(one.ids, np.int32) for one in found])

    def encode_each(self, texts: list[bytes]) -> list[NDArray[np.int32]]:
        """Token ids `[N]` of each text, as `encode` gives them."""
        read = [text.decode("utf-8", "replace") for text in texts]
        found = self._tokenizer.encode_batch_fast(read, add_special_tokens=False)
        return [np.array(one.ids, np.int32) for one in found]

    def encode_sized(self, text: bytes) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Token ids `[N]` and their sizes in bytes `[N]`.

        Each byte counts once, for the first token that covers it, so dropped or doubly written text does not
        change the sum of sizes.
        """
        blocks = _blocks(text.decode("utf-8", "replace"), _BLOCK_BYTES)
        found = self._tokenizer.encode_batch(blocks, add_special_tokens=False)
        sizes = [_sizes(block, one.offsets) for block, one in zip(blocks, found, strict=True)]
        return _joined([np.array(one.ids, np.int32) for one in found]), _joined(sizes)


def train_bpe(text: bytes) -> SubwordTokenizer:
    """Train the 8k BPE on a text's first 16 MiB. Ties are broken by token id, so one text gives one tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BPE_VOCAB,
        show_progress=False,
        special_tokens=[],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    sample = text[:_TRAIN_MAX_BYTES].decode("utf-8", "replace")
    tokenizer.train_from_iterator(_blocks(sample, _BLOCK_BYTES), trainer)
    return SubwordTokenizer(tokenizer, tokenizer.to_str().encode())


def built_in_tokenizer(name: str, train_text: bytes) -> TextTokenizer:
    """The tokenizer `bytes` or `bpe8k`, trained on `train_text`. Raises ConfigError for another name."""
    if name == "bytes":
        return ByteTokenizer()
    if name == "bpe8k":
        return train_bpe(train_text)
    raise ConfigError(f"unknown tokenizer {name!r}", hint="use bytes or bpe8k")


def _joined(parts: list[NDArray[np.int32]]) -> NDArray[np.int32]:
    return np.concatenate(parts or [np.empty(0, np.int32)])


def _sizes(block: str, offsets: list[tuple[int, int]]) -> NDArray[np.int32]:
    """Bytes of each token from its offsets in characters; the last token gets the rest of the block."""
    widths = [len(letter.encode()) for letter in block] if not block.isascii() else [1] * len(block)
    until = np.concatenate([[0], np.cumsum(widths)])
    ends = np.maximum.accumulate(np.array([end for _, end in offsets], np.int64))
    if len(ends):
        ends[-1] = len(block)
    return np.diff(until[ends], prepend=0).astype(np.int32)


def _blocks(text: str, size: int) -> list[str]:
    """Pieces of about `size` characters, cut at line breaks if possible so that no word is split."""
    found, at = [], 0
    while at < len(text):
        end = text.rfind("\n", at, at + size) + 1 or at + size  # rfind gives −1 without a line break
        found.append(text[at:end])
        at = end
    return found


def keep_tokens(path: Path, text: Digest, tokens: Tokens) -> None:
    """Write the tokens of the text with this digest, for the next start. Raises DiskFault.

    Each token takes one or two bytes in most runs. Nothing is written where that is more than `KEPT_MOST_BYTES`.
    """
    arrays = [np.frombuffer(tokens.identity, np.uint8), *map(_narrow, tokens[1:])]
    if sum(array.nbytes for array in arrays) > KEPT_MOST_BYTES:
        return
    file = io.BytesIO()
    for array in arrays:
        np.save(file, array, allow_pickle=False)
    body = file.getvalue()
    write_whole(path, digest(_KEPT, text, body) + body)


def kept_tokens(path: Path, text: Digest) -> Tokens | None:
    """What `keep_tokens` wrote for this text; None if there is nothing, or a byte of it is another one."""
    try:
        with open_file(path) as file:
            check, body = file.read(_CHECK_BYTES), file.read(2 * KEPT_MOST_BYTES)
    except (OSError, DiskFault):
        return None
    if digest(_KEPT, text, body) != check:
        return None
    read = io.BytesIO(body)
    identity, *arrays = [np.load(read, allow_pickle=False) for _ in Tokens._fields]
    return Tokens(identity.tobytes(), *[array.astype(np.int32) for array in arrays])


def _narrow(tokens_N: NDArray[np.int32]) -> NDArray[np.unsignedinteger]:
    return tokens_N.astype(np.min_scalar_type(tokens_N.max(initial=0)))
