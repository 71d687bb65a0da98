"""Cuts a run's text into windows of tokens `[B, T + 1]` for training, and a fixed bounded set for validation."""

from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from atoll.node.learning.data import corpus
from atoll.node.learning.data.given import load_tokenizer
from atoll.node.learning.data.tokens import TextTokenizer, built_in_tokenizer
from atoll.protocols.errors import ConfigError
from atoll.protocols.ids import Digest
from atoll.protocols.run.run_spec import DataSpec

MIN_WINDOWS = 8


class GivenTokenizer(NamedTuple):
    """The file of a tokenizer that travels with its run."""

    path: Path
    vocab: int
    """Number of tokens of the run's model."""


class Dataset(msgspec.Struct, frozen=True):
    """Token streams `[N]` of one run, int32."""

    train_N: NDArray[np.int32]
    val_N: NDArray[np.int32]
    val_bytes_N: NDArray[np.int32]
    """Bytes of text that each validation token stands for."""
    digest: Digest
    context: int

    @property
    def num_windows(self) -> int:
        """Number of training windows; each shares only its last token with the next."""
        return (len(self.train_N) - 1) // self.context

    def batch(self, windows_B: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens `[B, T + 1]`, int64, of training windows."""
        return _cut(self.train_N, windows_B, self.context)

    def validation(self, limit: int) -> NDArray[np.int64]:
        """At most `limit` windows `[W, T + 1]`, int64, evenly spread over the validation text; always the same."""
        return _cut(self.val_N, self._chosen(limit), self.context)

    def validation_bytes(self, limit: int) -> int:
        """Bytes of text of the predicted tokens of these windows: all but the first of each."""
        return int(_cut(self.val_bytes_N, self._chosen(limit), self.context)[:, 1:].sum())

    def _chosen(self, limit: int) -> NDArray[np.int64]:
        count = (len(self.val_N) - 1) // self.context
        return np.arange(min(limit, count), dtype=np.int64) * count // min(limit, count)


def open_dataset(
    spec: DataSpec, context: int, path: str, cache: Path, given: GivenTokenizer | None = None
) -> Dataset:
    """Load, tokenize and check a run's text; `given` is the tokenizer `file`.

    Raises ConfigError with a hint, Unreachable if a first fetch fails.
    """
    text = corpus.load_corpus(spec.source, path, cache)
    tokens: TextTokenizer
    if given is None:
        tokens = built_in_tokenizer(spec.tokenizer, text.train)
    else:
        tokens = load_tokenizer(given.path, given.vocab)
    found = corpus.text_digest(text, tokens.identity)
    if spec.digest and found != spec.digest:
        raise ConfigError(
            f"{spec.source} here ({found.hex()[:12]}) is not the text of this run ({spec.digest.hex()[:12]})",
            hint="use the run's file, and the same version of the tokenizers package",
        )
    dataset = Dataset(tokens.encode(text.train), *tokens.encode_sized(text.val), found, context)
    if dataset.num_windows < MIN_WINDOWS or len(dataset.val_N) <= context:
        raise ConfigError(
            f"{spec.source} is too short: {len(dataset.train_N)} training, {len(dataset.val_N)} validation tokens",
            hint=f"give at least {max(MIN_WINDOWS, 20) * (context + 1)} tokens",
        )
    return dataset


def digest_of(spec: DataSpec, path: str, cache: Path, given: bytes | None = None) -> Digest:
    """DataSpec.digest of a new run, from the text as it is here; `given` has the bytes of the tokenizer `file`."""
    text = corpus.load_corpus(spec.source, path, cache)
    identity = built_in_tokenizer(spec.tokenizer, text.train).identity if given is None else given
    return corpus.text_digest(text, identity)


def _cut(tokens_N: NDArray[np.int32], windows_B: NDArray[np.int64], context: int) -> NDArray[np.int64]:
    at_BT1 = windows_B[:, None] * context + np.arange(context + 1)
    found: NDArray[np.int64] = tokens_N[at_BT1].astype(np.int64)
    return found
