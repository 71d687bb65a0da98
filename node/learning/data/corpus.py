"""Loads the text of a run from its source, with its train/validation split and its digest.

Sources: `builtin:shakespeare`, `synthetic:markov[?seed=N&size=BYTES]`, and `file:NAME`, for which each node has
its own path. A file is plain text, or JSON lines with a `text` key; its last 5 % is validation.
"""

from pathlib import Path

import msgspec

from atoll.node.learning.data import markov, shakespeare
from atoll.protocols.errors import ConfigError
from atoll.protocols.ids import Digest, digest

MIN_BYTES = 4096
"""Smallest text of a file: below this, neither part holds a few windows."""
MAX_BYTES = 8 << 30
VAL_SHARE = 20
"""One byte of this many is validation."""


class _JsonLine(msgspec.Struct, frozen=True):
    text: str


class Corpus(msgspec.Struct, frozen=True):
    """The training text and the validation text of a run."""

    train: bytes
    val: bytes


def load_corpus(source: str, path: str, cache: Path) -> Corpus:
    """Load the text of a DataSpec's `source`.

    `path` is the local file of a `file:` source; `cache` is the folder of fetched texts. Raises ConfigError for a
    source that does not exist or cannot be used, Unreachable if a first fetch fails.
    """
    if source == "builtin:shakespeare":
        return Corpus(*shakespeare.shakespeare_texts(cache))
    if source == "synthetic:markov" or source.startswith("synthetic:markov?"):
        return Corpus(*markov.markov_texts(markov.parse_markov(source)))
    if source.startswith("file:"):
        return Corpus(*file_texts(path or source.removeprefix("file:")))
    hint = "use builtin:shakespeare, synthetic:markov or file:PATH"
    raise ConfigError(f"unknown data source {source!r}", hint=hint)


def text_digest(corpus: Corpus, tokenizer: bytes = b"") -> Digest:
    """DataSpec.digest: BLAKE3 of a text, its split and its tokenizer (empty for `bytes`)."""
    parts = (corpus.train, corpus.val, tokenizer)
    sizes = b"".join(len(part).to_bytes(8, "little") for part in parts)
    return digest(b"atoll data/1", sizes, *parts)


def file_texts(path: str) -> tuple[bytes, bytes]:
    """Training and validation text of a file. Raises ConfigError if it cannot be used."""
    data = read_text(Path(path).expanduser())
    if len(data) < MIN_BYTES:
        raise ConfigError(
            f"data file {path} holds {len(data)} bytes of text", hint=f"give at least {MIN_BYTES} bytes"
        )
    cut = _line_end(data, len(data) - len(data) // VAL_SHARE)
    return data[:cut], data[cut:]


def read_text(path: Path) -> bytes:
    """All text of a file; for `.jsonl` the `text` values with a blank line between. Raises ConfigError."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"data file {path} is above {MAX_BYTES >> 30} GiB", hint="split it")
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise ConfigError(f"no data file at {path}", hint="give the path of your copy with --data") from error
    except OSError as error:
        raise ConfigError(
            f"cannot read data file {path}: {error.strerror}", hint="give a readable file"
        ) from error
    return b"\n\n".join(_jsonl(path, data)) if path.suffix == ".jsonl" else data


def _jsonl(path: Path, data: bytes) -> list[bytes]:
    decoder = msgspec.json.Decoder(_JsonLine)
    found = []
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found.append(decoder.decode(line).text.encode())
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise ConfigError(
                f"{path} line {number}: {error}", hint='each line must be like {"text": "…"}'
            ) from error
    return found


def _line_end(data: bytes, near: int) -> int:
    """Index after a line break just past `near`, so that no character is split; `near` if there is none."""
    at = data.find(b"\n", near, near + 1024)
    return near if at < 0 else at + 1
