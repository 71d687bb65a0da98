"""The text of a run: where each source comes from, its train/validation split and its digest.

Sources: `builtin:shakespeare`, `synthetic:markov[?seed=N&size=BYTES]`, `file:NAME` (each node has its own path).
"""

import math
from pathlib import Path

import msgspec
import numpy as np

from atoll.node.learning.data import files, markov, shakespeare
from atoll.protocols.errors import ConfigError
from atoll.protocols.ids import Digest, digest


class Corpus(msgspec.Struct, frozen=True):
    """Bytes to train on and bytes to validate on."""

    train: bytes
    val: bytes


def load(source: str, path: str, cache: Path) -> Corpus:
    """The text of a DataSpec's `source`.

    `path` is the local file of a `file:` source; `cache` is where fetched texts are kept.
    Raises ConfigError for a source that does not exist or cannot be used, Unreachable when a first fetch fails.
    """
    if source == "builtin:shakespeare":
        return Corpus(*shakespeare.texts(cache))
    if source == "synthetic:markov" or source.startswith("synthetic:markov?"):
        return Corpus(*markov.texts(markov.parse(source)))
    if source.startswith("file:"):
        return Corpus(*files.texts(path or source.removeprefix("file:")))
    raise ConfigError(
        f"unknown data source {source!r}",
        hint="use builtin:shakespeare, synthetic:markov or file:PATH",
    )


def text_digest(corpus: Corpus, tokenizer: bytes = b"") -> Digest:
    """BLAKE3 that names a text, its split and its tokenizer (empty for bytes): DataSpec.digest."""
    parts = (corpus.train, corpus.val, tokenizer)
    sizes = b"".join(len(part).to_bytes(8, "little") for part in parts)
    return digest(b"atoll data/1", sizes, *parts)


def unigram_bits_per_byte(text: bytes) -> float:
    """Entropy of the byte frequencies: what a model that only counts bytes would reach."""
    counts = np.bincount(np.frombuffer(text, np.uint8), minlength=256)
    share = counts[counts > 0] / max(len(text), 1)
    return -math.fsum(float(p) * math.log2(p) for p in share)
