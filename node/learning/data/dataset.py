"""A run's text as windows of tokens: `[batch, context + 1]` for training, a fixed bounded set for validation."""

from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from atoll.node.learning.data import corpus
from atoll.node.learning.data.given import read_tokenizer
from atoll.node.learning.data.tokens import Tokens, tokenizer_for
from atoll.protocols.errors import ConfigError
from atoll.protocols.ids import Digest
from atoll.protocols.run.run_spec import DataSpec

MIN_WINDOWS = 8


class GivenTokenizer(NamedTuple):
    """A tokenizer that travels with its run."""

    path: Path
    vocab: int
    """Of the run's model."""


class Dataset(msgspec.Struct, frozen=True):
    """Token streams of one run, int32, and how many bytes of text each validation token stands for."""

    train_N: NDArray[np.int32]
    val_N: NDArray[np.int32]
    val_bytes_N: NDArray[np.int32]
    digest: Digest
    context: int

    @property
    def num_windows(self) -> int:
        """Training windows: they share only their last token with the next."""
        return (len(self.train_N) - 1) // self.context

    def batch(self, windows_B: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens `[B, context + 1]` of training windows."""
        return _cut(self.train_N, windows_B, self.context)

    def validation(self, limit: int) -> NDArray[np.int64]:
        """At most `limit` windows `[W, context + 1]`, evenly spread over the validation text; always the same."""
        return _cut(self.val_N, self._chosen(limit), self.context)

    def validation_bytes(self, limit: int) -> int:
        """Bytes that the predicted tokens of these windows (all but each one's first) stand for."""
        return int(_cut(self.val_bytes_N, self._chosen(limit), self.context)[:, 1:].sum())

    def _chosen(self, limit: int) -> NDArray[np.int64]:
        count = (len(self.val_N) - 1) // self.context
        return np.arange(min(limit, count), dtype=np.int64) * count // min(limit, count)


def open_data(
    spec: DataSpec, context: int, path: str, cache: Path, given: GivenTokenizer | None = None
) -> Dataset:
    """Load, tokenize and check a run's text. `given`: for the tokenizer `file`.

    Raises ConfigError with a hint, Unreachable when a first fetch fails.
    """
    text = corpus.load(spec.source, path, cache)
    tokens: Tokens = tokenizer_for(spec.tokenizer, text.train) if given is None else read_tokenizer(*given)
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
    """The digest for a new run's DataSpec, from the text as it is here. `given`: bytes of the tokenizer `file`."""
    text = corpus.load(spec.source, path, cache)
    return corpus.text_digest(text, tokenizer_for(spec.tokenizer, text.train).identity if given is None else given)


def _cut(tokens_N: NDArray[np.int32], windows_B: NDArray[np.int64], context: int) -> NDArray[np.int64]:
    at_BT1 = windows_B[:, None] * context + np.arange(context + 1)
    found: NDArray[np.int64] = tokens_N[at_BT1].astype(np.int64)
    return found
