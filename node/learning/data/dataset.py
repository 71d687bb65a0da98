"""Cuts a run's text into windows of tokens `[B, T + 1]`: which ones a member trains on, and a set for validation.

All windows of the text have one shuffled order, keyed by the run's seed. Each step of all members together takes
the next `slots × batch` places of that order, cyclically. So members never read a window twice within one pass,
and while the number of members is constant, all windows are read before any is read again. The choice is a pure
function of (seed, step, slot): it can be resumed anywhere. In a run with audits a member's place in that order is
drawn for each round instead, from its PeerID.
"""

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from atoll.node.learning.data import corpus
from atoll.node.learning.data.given import load_tokenizer
from atoll.node.learning.data.packed import open_packed
from atoll.node.learning.data.tokens import (
    TextTokenizer,
    Tokens,
    built_in_tokenizer,
    keep_tokens,
    kept_tokens,
)
from atoll.protocols.data.shard_order import Turn
from atoll.protocols.errors import ConfigError, DiskFault
from atoll.protocols.ids import Digest, digest
from atoll.protocols.run.run_spec import DataSpec, RunSpec
from atoll.protocols.run.sections.privacy import has_own_data

MIN_WINDOWS = 8
BESIDE = 128
"""Windows on either side of one that are of the same kind of text, but not trained on with it."""
_ASSIGNED = b"atoll assigned/1"
_ROUNDS = 6


class GivenTokenizer(NamedTuple):
    """The file of a tokenizer that travels with its run."""

    path: Path
    vocab: int
    """Number of tokens of the run's model."""


class RunText(Protocol):
    """A run's text as windows of tokens: `Dataset`, which is in memory, or `PackedText`, which is not."""

    @property
    def num_windows(self) -> int:
        """Number of training windows."""
        ...

    @property
    def digest(self) -> Digest:
        """Of all that is read: another text has another one."""
        ...

    def windows_of(self, spec: RunSpec, turn: Turn, at_W: NDArray[np.int64]) -> NDArray[np.int64]:
        """Indices `[W]`, int64, of the windows with these numbers, from 0, of a member's turn."""
        ...

    def windows_beside(self, at_W: NDArray[np.int64], rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """Indices `[count]`, int64, of windows that `rng` draws from the parts of the text that these lie in."""
        ...

    def batch(self, windows_B: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens `[B, T + 1]`, int64, of training windows."""
        ...

    def validation(self, limit: int) -> NDArray[np.int64]:
        """At most `limit` windows `[W, T + 1]`, int64, evenly spread over the validation text; always the same."""
        ...

    def validation_bytes(self, limit: int) -> int:
        """Bytes of text of the predicted tokens of these windows: all but the first of each."""
        ...


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

    def windows_of(self, spec: RunSpec, turn: Turn, at_W: NDArray[np.int64]) -> NDArray[np.int64]:
        """Indices `[W]`, int64, of the windows with these numbers, from 0, of a member's turn."""
        return windows_at(place_of(spec, turn), at_W, self.num_windows)

    def windows_beside(self, at_W: NDArray[np.int64], rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """Indices `[count]`, int64, of windows that `rng` draws, each at most BESIDE away from one of these."""
        away = rng.integers(1, BESIDE + 1, count) * rng.choice([-1, 1], count)
        found: NDArray[np.int64] = (rng.choice(at_W, count) + away) % self.num_windows
        return found

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


def open_text(
    spec: RunSpec,
    path: str,
    cache: Path,
    blobs: Path,
    given: GivenTokenizer | None = None,
    examples_of: corpus.Examples | None = None,
    kept: Path | None = None,
) -> RunText:
    """The text of a run: `path` is this machine's copy, `blobs` the folder of the run's blobs, `kept` see below.

    Raises ConfigError with a hint, CorruptFault, DiskFault, Unreachable if a first fetch fails.
    """
    if spec.data.index is not None:
        return open_packed(spec, blobs)
    return open_dataset(spec.data, spec.model.context, path, cache, given, examples_of, kept)


def open_dataset(
    spec: DataSpec,
    context: int,
    path: str,
    cache: Path,
    given: GivenTokenizer | None = None,
    examples_of: corpus.Examples | None = None,
    kept: Path | None = None,
) -> Dataset:
    """Load, tokenize and check a run's text; `given` is the tokenizer `file`.

    `kept`: a file of the tokens, which the next start takes. A text of the user's is read and checked all the
    same. Raises ConfigError with a hint, Unreachable if a first fetch fails.
    """
    if not spec.digest:
        kept = None  # nothing says whether it is the same text
    old = kept_tokens(kept, Digest(spec.digest)) if kept is not None else None
    made_here = corpus.is_made_here(spec.source)
    if old is not None and made_here:
        return Dataset(*old[1:], Digest(spec.digest), context)
    text = corpus.load_corpus(spec.source, path, cache, examples_of)
    if old is not None and corpus.text_digest(text, old.identity) == spec.digest:
        return Dataset(*old[1:], Digest(spec.digest), context)
    dataset, identity = _tokenized(spec, context, text, given)
    if kept is not None and (identity or made_here):
        with suppress(DiskFault):  # the next start makes them again
            keep_tokens(
                kept, dataset.digest, Tokens(identity, dataset.train_N, dataset.val_N, dataset.val_bytes_N)
            )
    return dataset


def _tokenized(
    spec: DataSpec, context: int, text: corpus.Corpus, given: GivenTokenizer | None
) -> tuple[Dataset, bytes]:
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
    if spec.size and spec.size != _size(text):
        raise ConfigError(
            f"{spec.source} has {_size(text)} bytes, and the run says {spec.size}", hint="ask its owner"
        )
    dataset = Dataset(tokens.encode(text.train), *tokens.encode_sized(text.val), found, context)
    if dataset.num_windows < MIN_WINDOWS or len(dataset.val_N) <= context:
        raise ConfigError(
            f"{spec.source} is too short: {len(dataset.train_N)} training, {len(dataset.val_N)} validation tokens",
            hint=f"give at least {max(MIN_WINDOWS, 20) * (context + 1)} tokens",
        )
    return dataset, tokens.identity


def measured(
    spec: DataSpec,
    path: str,
    cache: Path,
    given: bytes | None = None,
    examples_of: corpus.Examples | None = None,
) -> DataSpec:
    """With digest and size of the text as it is here, for a new run; `given`: bytes of the tokenizer `file`."""
    text = corpus.load_corpus(spec.source, path, cache, examples_of)
    identity = built_in_tokenizer(spec.tokenizer, text.train).identity if given is None else given
    return msgspec.structs.replace(spec, digest=corpus.text_digest(text, identity), size=_size(text))


def _size(text: corpus.Corpus) -> int:
    return len(text.train) + len(text.val)


def _cut(tokens_N: NDArray[np.int32], windows_B: NDArray[np.int64], context: int) -> NDArray[np.int64]:
    at_BT1 = windows_B[:, None] * context + np.arange(context + 1)
    found: NDArray[np.int64] = tokens_N[at_BT1].astype(np.int64)
    return found


# --- who reads which windows ---------------------------------------------------------------------


class WindowPlace(msgspec.Struct, frozen=True):
    """A member's place in a round."""

    seed: int
    first_step: int
    """Number of inner steps of all earlier rounds (RunSpec.steps_before)."""
    slot: int
    slots: int
    batch: int


def place_of(spec: RunSpec, turn: Turn) -> WindowPlace:
    """A member's place in a round of this run."""
    if spec.audit:
        return assigned(spec.seed, turn.round, turn.author, spec.inner.batch)
    if has_own_data(spec):  # nobody shares it: each window once before any comes again
        return WindowPlace(spec.seed, spec.steps_before(turn.round), 0, 1, spec.inner.batch)
    return WindowPlace(spec.seed, spec.steps_before(turn.round), turn.slot, turn.slots, spec.inner.batch)


def assigned(seed: int, number: int, author: str, batch: int) -> WindowPlace:
    """The place of a member in round `number` of a run with audits: drawn, so that anybody knows its windows.

    Nobody chooses it, and nobody shares it: work that was copied is work on somebody else's windows.
    """
    drawn = digest(_ASSIGNED, seed.to_bytes(8, "little"), number.to_bytes(4, "little"), author.encode())
    return WindowPlace(seed, int.from_bytes(drawn[:5], "little"), 0, 1, batch)


def windows(place: WindowPlace, step: int, num_windows: int) -> NDArray[np.int64]:
    """Indices `[B]`, int64, of the windows of whole inner step `step` (from 0) of the round."""
    return windows_at(place, np.arange(step * place.batch, (step + 1) * place.batch), num_windows)


def windows_at(place: WindowPlace, at_W: NDArray[np.int64], num_windows: int) -> NDArray[np.int64]:
    """Indices `[W]`, int64, of the member's windows of the round with these numbers, from 0, in its order.

    Whoever takes fewer sequences a step takes the same windows one after the other, in more steps.
    """
    step_W, row_W = np.divmod(at_W, place.batch)
    order_W = ((place.first_step + step_W) * place.slots + place.slot) * place.batch + row_W
    return permuted(order_W.astype(np.uint64) % np.uint64(num_windows), place.seed, num_windows).astype(np.int64)


def permuted(at: NDArray[np.uint64], seed: int, size: int) -> NDArray[np.uint64]:
    """Values at places `at` of a permutation of 0 … size−1, which is not stored.

    A Feistel network permutes the next power of four. Values outside are permuted again until they are inside
    ("cycle walking", Black and Rogaway 2002), fewer than four times on average.
    """
    half = max(1, -(-(size - 1).bit_length() // 2))
    keys = np.frombuffer(digest(b"atoll windows/1", seed.to_bytes(8, "little")) * 2, "<u8")[:_ROUNDS]
    out = _feistel(at, half, keys)
    outside = out >= np.uint64(size)
    while outside.any():
        out[outside] = _feistel(out[outside], half, keys)
        outside = out >= np.uint64(size)
    return out


def _feistel(value: NDArray[np.uint64], half: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = value >> bits, value & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return left << bits | right


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64, elementwise; uint64 products wrap by definition."""
    value = (value ^ value >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ value >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return value ^ value >> np.uint64(31)
