"""Tokenizers: `bytes` (256 tokens), `bpe8k` (8192 tokens, trained from the run's own text), `file` (given.py).

The BPE is trained on every member. Its bytes are part of the run's data digest, so that a member whose
library trains another one is told so before it sends anything.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from atoll.protocols.errors import ConfigError

BPE_VOCAB = 8192
_TRAIN_MAX_BYTES = 16 << 20
_BLOCK_BYTES = 1 << 16


class Tokens(Protocol):
    """Text to token ids and back."""

    vocab: int
    identity: bytes
    """What the tokenizer is, for the data digest; empty for bytes."""

    def encode(self, text: bytes) -> NDArray[np.int32]:
        """Token ids of a text."""
        ...

    def encode_sized(self, text: bytes) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Token ids, and the bytes of the text that each stands for: from loss per token to bits per byte."""
        ...

    def decode(self, tokens: NDArray[np.int32]) -> bytes:
        """Text of token ids."""
        ...


class Bytes:
    """Every byte is a token."""

    vocab = 256
    identity = b""

    def encode(self, text: bytes) -> NDArray[np.int32]:
        """One id per byte."""
        return np.frombuffer(text, np.uint8).astype(np.int32)

    def encode_sized(self, text: bytes) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """All sizes are 1."""
        return self.encode(text), np.ones(len(text), np.int32)

    def decode(self, tokens: NDArray[np.int32]) -> bytes:
        """One byte per id."""
        return tokens.astype(np.uint8).tobytes()


class Subwords:
    """Whatever the `tokenizers` library runs. Special tokens are never added."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, identity: bytes) -> None:
        self._tokenizer = tokenizer
        self.vocab = vocab
        self.identity = identity

    def encode(self, text: bytes) -> NDArray[np.int32]:
        """Token ids. Broken UTF-8 becomes the replacement character."""
        blocks = _blocks(text.decode("utf-8", "replace"), _BLOCK_BYTES)
        found = self._tokenizer.encode_batch_fast(blocks, add_special_tokens=False)
        return _joined([np.array(one.ids, np.int32) for one in found])

    def encode_sized(self, text: bytes) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Each byte counts once, for the first token that reaches it: what a tokenizer drops, or writes as more
        than one token, makes no difference to their sum.
        """
        blocks = _blocks(text.decode("utf-8", "replace"), _BLOCK_BYTES)
        found = self._tokenizer.encode_batch(blocks, add_special_tokens=False)
        sizes = [_sizes(block, one.offsets) for block, one in zip(blocks, found, strict=True)]
        return _joined([np.array(one.ids, np.int32) for one in found]), _joined(sizes)

    def decode(self, tokens: NDArray[np.int32]) -> bytes:
        """The text; bytes that are not UTF-8 come back as the replacement character."""
        return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False)).encode()


def train_bpe(text: bytes) -> Subwords:
    """The 8k BPE of a text's first 16 MiB: ties are broken by token id, so one text gives one tokenizer."""
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
    return Subwords(tokenizer, BPE_VOCAB, tokenizer.to_str().encode())


def tokenizer_for(name: str, train_text: bytes) -> Tokens:
    """The tokenizer of DataSpec.tokenizer, unless that is `file`. Raises ConfigError for a name that is none."""
    if name == "bytes":
        return Bytes()
    if name == "bpe8k":
        return train_bpe(train_text)
    raise ConfigError(f"unknown tokenizer {name!r}", hint="use bytes or bpe8k")


def _joined(parts: list[NDArray[np.int32]]) -> NDArray[np.int32]:
    return np.concatenate(parts or [np.empty(0, np.int32)])


def _sizes(block: str, offsets: list[tuple[int, int]]) -> NDArray[np.int32]:
    """Bytes of each token from where it begins and ends, in characters; the last one takes what is left."""
    widths = [len(letter.encode()) for letter in block] if not block.isascii() else [1] * len(block)
    until = np.concatenate([[0], np.cumsum(widths)])
    ends = np.maximum.accumulate(np.array([end for _, end in offsets], np.int64))
    if len(ends):
        ends[-1] = len(block)
    return np.diff(until[ends], prepend=0).astype(np.int32)


def _blocks(text: str, size: int) -> list[str]:
    """Pieces of about `size` characters that end at a line break where there is one: cuts change no word."""
    found, at = [], 0
    while at < len(text):
        end = text.rfind("\n", at, at + size) + 1 or at + size
        found.append(text[at:end])
        at = end
    return found
