"""Tokenizers: `bytes` (256 tokens, no file) and `bpe8k` (8192 tokens, trained from the run's own text).

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

    def decode(self, tokens: NDArray[np.int32]) -> bytes:
        """Text of token ids."""
        ...

    def widths(self) -> NDArray[np.int32]:
        """Bytes of each token `[vocab]`: from loss per token to bits per byte."""
        ...


class Bytes:
    """Every byte is a token."""

    vocab = 256
    identity = b""

    def encode(self, text: bytes) -> NDArray[np.int32]:
        """One id per byte."""
        return np.frombuffer(text, np.uint8).astype(np.int32)

    def decode(self, tokens: NDArray[np.int32]) -> bytes:
        """One byte per id."""
        return tokens.astype(np.uint8).tobytes()

    def widths(self) -> NDArray[np.int32]:
        """All 1."""
        return np.ones(self.vocab, np.int32)


class Bpe:
    """Byte-level BPE: lossless for UTF-8 text, no unknown token."""

    vocab = BPE_VOCAB

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.identity = tokenizer.to_str().encode()

    def encode(self, text: bytes) -> NDArray[np.int32]:
        """Token ids. Broken UTF-8 becomes the replacement character."""
        blocks = _blocks(text.decode("utf-8", "replace"), _BLOCK_BYTES)
        found = self._tokenizer.encode_batch_fast(blocks, add_special_tokens=False)
        return np.concatenate([np.array(one.ids, np.int32) for one in found] or [np.empty(0, np.int32)])

    def decode(self, tokens: NDArray[np.int32]) -> bytes:
        """The text; bytes that are not UTF-8 come back as the replacement character."""
        return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False)).encode()

    def widths(self) -> NDArray[np.int32]:
        """In the byte-level alphabet every character of a token stands for one byte."""
        out = np.ones(self.vocab, np.int32)
        for token, number in self._tokenizer.get_vocab().items():
            out[number] = len(token)
        return out


def train_bpe(text: bytes) -> Bpe:
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
    return Bpe(tokenizer)


def tokenizer_for(name: str, train_text: bytes) -> Tokens:
    """The tokenizer of DataSpec.tokenizer. Raises ConfigError for a name that is none."""
    if name == "bytes":
        return Bytes()
    if name == "bpe8k":
        return train_bpe(train_text)
    raise ConfigError(f"unknown tokenizer {name!r}", hint="use bytes or bpe8k")


def _blocks(text: str, size: int) -> list[str]:
    """Pieces of about `size` characters that end at a line break where there is one: cuts change no word."""
    found, at = [], 0
    while at < len(text):
        end = text.rfind("\n", at, at + size) + 1 or at + size
        found.append(text[at:end])
        at = end
    return found
