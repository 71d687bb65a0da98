"""Loads the text of a run from its source, with its train/validation split and its digest.

Sources: `builtin:shakespeare`, `synthetic:markov[?seed=N&size=BYTES]`, `plugin:NAME` (examples of a package's
model), and `file:NAME`, of which each node has a copy at a path of its own (see `documents.py`); the last 5 % of
it is validation.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import msgspec

from atoll.node.learning.data import markov, shakespeare
from atoll.node.learning.data.documents import read_documents
from atoll.protocols.data.file_source import FILE, FileSource, parse_file_source
from atoll.protocols.errors import ConfigError
from atoll.protocols.ids import Digest, digest
from atoll.protocols.run.sections.plugin import SOURCE

MIN_BYTES = 4096
"""Smallest text of a file: below this, neither part holds a few windows."""
VAL_SHARE = 20
"""One byte of this many is validation."""
Examples: TypeAlias = Callable[[str], tuple[bytes, bytes]]
"""Makes training and validation examples of a source `plugin:NAME`."""


class Corpus(msgspec.Struct, frozen=True):
    """The training text and the validation text of a run."""

    train: bytes
    val: bytes


def is_made_here(source: str) -> bool:
    """Whether the text of a DataSpec's `source` comes with Atoll, so that no file of the user's is read for it."""
    return source == "builtin:shakespeare" or source.partition("?")[0] == "synthetic:markov"


def load_corpus(source: str, path: str, cache: Path, examples_of: Examples | None = None) -> Corpus:
    """Load the text of a DataSpec's `source`.

    `path` is the local file of a `file:` source; `cache` is the folder of fetched texts;
    `examples_of` makes those of a package's model (node/learning/plugged/loading.py). Raises ConfigError for a
    source that does not exist or cannot be used, Unreachable if a first fetch fails.
    """
    if source == "builtin:shakespeare":
        return Corpus(*shakespeare.shakespeare_texts(cache))
    if source == "synthetic:markov" or source.startswith("synthetic:markov?"):
        return Corpus(*markov.markov_texts(markov.parse_markov(source)))
    if source.startswith(SOURCE) and examples_of is not None:
        return Corpus(*examples_of(source))
    if source.startswith(FILE):
        found = parse_file_source(source)
        return Corpus(*file_texts(path or found.name, found))
    hint = "use builtin:shakespeare, synthetic:markov or a path"
    if source.startswith("hf:"):
        hint = f"pack it once: atoll data pack {source} --out DIR; then give that folder"
    raise ConfigError(f"unknown data source {source!r}", hint=hint)


def text_digest(corpus: Corpus, tokenizer: bytes = b"") -> Digest:
    """DataSpec.digest: BLAKE3 of a text, its split and its tokenizer (empty for `bytes`)."""
    parts = (corpus.train, corpus.val, tokenizer)
    sizes = b"".join(len(part).to_bytes(8, "little") for part in parts)
    return digest(b"atoll data/1", sizes, *parts)


def file_texts(path: str, source: FileSource) -> tuple[bytes, bytes]:
    """Training and validation text of a file, folder or pattern. Raises ConfigError if it cannot be used."""
    data = read_documents(path, source)
    if len(data) < MIN_BYTES:
        raise ConfigError(f"{path} holds {len(data)} bytes of text", hint=f"give at least {MIN_BYTES} bytes")
    cut = _line_end(data, len(data) - len(data) // VAL_SHARE)
    return data[:cut], data[cut:]


def _line_end(data: bytes, near: int) -> int:
    """Index after a line break just past `near`, so that no character is split; `near` if there is none."""
    at = data.find(b"\n", near, near + 1024)
    return near if at < 0 else at + 1
