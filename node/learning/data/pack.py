"""Packs texts into shards of tokens, once: members fetch the shards from each other, and need no copy of the text.

Memory is bounded whatever the size of the texts. Each document is cut into pieces of at most 64 KiB, shuffled over
all (`shuffle_files`), and written into shards of equal size. A piece is held out for validation by the hash of its
text, so two copies of a document are on the same side. Of several texts with weights the scarcest is taken whole,
and of each other one a random part, so that their tokens have the ratio of the weights.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from atoll.node.learning.data.documents import SEPARATOR, documents_at, files_at, plain_bytes
from atoll.node.learning.data.given import open_tokenizer, vocab_of
from atoll.node.learning.data.hub import HUB, hub_documents
from atoll.node.learning.data.shuffle_files import FILES, ShuffleFiles
from atoll.node.learning.data.tokenizer_choice import TokenizerChoice, choose_tokenizer
from atoll.node.learning.data.tokens import ByteTokenizer, TextTokenizer, train_bpe
from atoll.p2p.system.atomic_files import disk, sync_folder, write_whole
from atoll.protocols import codec
from atoll.protocols.blobs import manifest_of_bytes, manifest_of_file
from atoll.protocols.data.file_source import FileSource
from atoll.protocols.data.shard_index import (
    HELD_OUT_FILE,
    INDEX_FILE,
    MAX_HELD_OUT_TOKENS,
    MAX_SHARDS,
    TOKENIZER_FILE,
    ShardIndex,
    shard_file,
)
from atoll.protocols.errors import ConfigError
from atoll.protocols.ids import Digest, digest

PIECE_BYTES = 1 << 16
HELD_OUT_TOKENS = min(1 << 20, MAX_HELD_OUT_TOKENS)
"""Tokens that are held out at most; what the hash holds out beyond them is left out."""
MIN_TOKENS = 4096
_SAMPLE_BYTES = 16 << 20
_BATCH = 1024
"""Pieces that are tokenized at a time."""
_HASH_SPAN = 1 << 64


class TextPart(NamedTuple):
    """One of the texts of a mixture."""

    name: str
    documents: Callable[[], Iterator[bytes]]
    """Reads the text from its beginning."""
    weight: float = 1.0
    size_bytes: int = 0
    """About how much it is; 0: unknown."""


class PackOptions(NamedTuple):
    """How texts are packed."""

    tokenizer: str
    """`bytes`, `bpe8k`, which is trained on the texts' first 16 MiB, or the path of a `tokenizer.json`."""
    shard_tokens: int
    """About so many tokens a shard; all have the same number."""
    holdout: float
    """Share of the text that is held out for validation."""
    seed: int


class Packed(NamedTuple):
    """What was packed."""

    packed: ShardIndex
    name: Digest
    """Blob id of the index."""
    tokenizer: TokenizerChoice
    shares: tuple[float, ...]
    """Share of each text that was taken."""
    left_out: int
    """Held-out tokens beyond HELD_OUT_TOKENS, which are in no file."""


def text_parts(sources: Sequence[str], weights: Sequence[float] | None, read: FileSource) -> list[TextPart]:
    """The texts of these files, folders, patterns and `hf:` names; without weights they are one text.

    `read` says what is read of rows. Raises ConfigError for a text that is not there.
    """
    for name in sources:
        if not name.startswith(HUB):
            files_at(name)

    def reader(*names: str) -> Callable[[], Iterator[bytes]]:
        return lambda: chain.from_iterable(_documents(name, read) for name in names)

    sizes = [0 if name.startswith(HUB) else plain_bytes(name) for name in sources]
    if weights is None:
        return [TextPart(", ".join(sources), reader(*sources), size_bytes=sum(sizes) if all(sizes) else 0)]
    named = zip(sources, weights, sizes, strict=True)
    return [TextPart(name, reader(name), weight, size) for name, weight, size in named]


def _documents(name: str, read: FileSource) -> Iterator[bytes]:
    return hub_documents(name, read) if name.startswith(HUB) else documents_at(name, read)


Report: TypeAlias = Callable[[str, int, int, bool], None]
"""Given what is done now, how much of it is done and of how much, 0 where nobody knows, and whether in bytes."""


def pack(parts: Sequence[TextPart], to: Path, options: PackOptions, report: Report) -> Packed:
    """Pack texts into the folder `to`, which must not exist: it is written whole or not at all.

    Raises ConfigError, DiskFault.
    """
    if to.exists():
        raise ConfigError(f"{to} exists already", hint="give another folder")
    with _new_folder(to) as folder:
        report("learning the tokenizer" if options.tokenizer == "bpe8k" else "opening the tokenizer", 0, 0, True)
        choice, tokens = _tokenizer(parts, options.tokenizer)
        index = ShardIndex(
            vocab=choice.vocab,
            shard_tokens=2,
            shards=bytes(32),
            held_out=bytes(32),
            held_out_tokens=2,
        )
        kind, rng = np.dtype(f"<u{index.token_bytes}"), np.random.default_rng(options.seed)
        held_out, sources = HeldOut(options.holdout, kind), list[ShuffleFiles]()
        for number, part in enumerate(parts):
            with ShuffleFiles(folder / f"source-{number}", kind, rng) as source:
                _deal(part, tokens, held_out, source, report)
            if not source.tokens:
                raise ConfigError(f"{part.name} holds no text to train on", hint="give more text")
            sources.append(source)
        shares = shares_of([source.tokens for source in sources], [part.weight for part in parts])
        shards, size = _write_shards(folder, sources, shares, options.shard_tokens, rng, report)
        for number in range(len(sources)):
            shutil.rmtree(folder / f"source-{number}")
        written = held_out.write(folder / HELD_OUT_FILE)
        index = ShardIndex(
            vocab=choice.vocab,
            shard_tokens=size,
            shards=b"".join(shards),
            held_out=written,
            held_out_tokens=held_out.count,
        )
        write_whole(folder / INDEX_FILE, codec.encode(index))
        if choice.data is not None:
            write_whole(folder / TOKENIZER_FILE, choice.data)
    return Packed(index, manifest_of_bytes(codec.encode(index)).id, choice, tuple(shares), held_out.left_out)


def shares_of(counts: Sequence[int], weights: Sequence[float]) -> list[float]:
    """The share of each text that is taken: the tokens have the ratio of the weights, and no text comes twice."""
    scarcest = min(count / weight for count, weight in zip(counts, weights, strict=True))
    return [min(1.0, scarcest * weight / count) for count, weight in zip(counts, weights, strict=True)]


def pieces(document: bytes) -> Iterator[bytes]:
    """A document in pieces of at most PIECE_BYTES, cut between paragraphs, lines, words or characters."""
    at = 0
    while len(document) - at > PIECE_BYTES:
        end = next(
            (
                cut
                for mark in (b"\n\n", b"\n", b" ")
                if (cut := document.rfind(mark, at + 1, at + PIECE_BYTES)) > at
            ),
            at + PIECE_BYTES,
        )
        while document[end] & 0xC0 == 0x80:  # inside of a character
            end -= 1
        yield document[at:end]
        at = end
    yield document[at:]


class HeldOut:
    """The held-out tokens of a packed text."""

    def __init__(self, share: float, kind: np.dtype[np.unsignedinteger]) -> None:
        self._below, self._kind = int(share * _HASH_SPAN), kind
        self._tokens: list[NDArray[np.int32]] = []
        self._sizes: list[NDArray[np.int32]] = []
        self.count = 0
        self.left_out = 0

    def takes(self, text: bytes) -> bool:
        """Whether this text is held out, by its hash."""
        return int.from_bytes(digest(text)[:8], "little") < self._below

    def add(self, tokens_N: NDArray[np.int32], sizes_N: NDArray[np.int32]) -> None:
        """Add a text's tokens `[N]` and the bytes `[N]` that each stands for."""
        if self.count + len(tokens_N) > HELD_OUT_TOKENS:
            self.left_out += len(tokens_N)
            return
        self._tokens.append(tokens_N)
        self._sizes.append(sizes_N)
        self.count += len(tokens_N)

    def write(self, path: Path) -> Digest:
        """Write the held-out file; return its blob id. Raises ConfigError where nothing is held out, DiskFault."""
        if self.count < 2:
            raise ConfigError("nothing is held out for validation", hint="give more text, or a larger --holdout")
        tokens_N = np.concatenate(self._tokens).astype(self._kind)
        sizes_N = np.minimum(np.concatenate(self._sizes), 0xFFFF).astype("<u2")
        data = tokens_N.tobytes() + sizes_N.tobytes()
        write_whole(path, data)
        return manifest_of_bytes(data).id


def _tokenizer(parts: Sequence[TextPart], chosen: str) -> tuple[TokenizerChoice, TextTokenizer]:
    if chosen == "bytes":
        return choose_tokenizer(chosen), ByteTokenizer()
    if chosen == "bpe8k":
        limit = _SAMPLE_BYTES // len(parts)
        sample = SEPARATOR.join(chain.from_iterable(_first(part.documents(), limit) for part in parts))
        trained = train_bpe(sample)
        return TokenizerChoice("file", vocab_of(trained.identity), trained.identity), trained
    choice = choose_tokenizer(chosen)
    assert choice.data is not None
    return choice, open_tokenizer(choice.data, choice.vocab)


def _first(documents: Iterable[bytes], limit: int) -> Iterator[bytes]:
    """Documents, and of the last one a part, until they have `limit` bytes."""
    for document in documents:
        if limit <= 0:
            return
        yield document[:limit]
        limit -= len(document)


def _deal(
    part: TextPart,
    tokens: TextTokenizer,
    held_out: HeldOut,
    source: ShuffleFiles,
    report: Report,
) -> None:
    """Tokenize a text, hold out a part of it, and deal the rest to the files of `source`."""
    done = 0
    texts = (piece + SEPARATOR for document in part.documents() for piece in pieces(document) if piece.strip())
    while batch := _batch(texts):
        done += sum(map(len, batch))
        train = [text for text in batch if not held_out.takes(text)]
        for tokens_N in tokens.encode_each(train):
            source.add(tokens_N)
        for text in batch:
            if held_out.takes(text):
                held_out.add(*tokens.encode_sized(text))
        report(f"reading {part.name}", done, part.size_bytes, True)


def _batch(texts: Iterator[bytes]) -> list[bytes]:
    return list(islice(texts, _BATCH))


def _write_shards(
    folder: Path,
    sources: Sequence[ShuffleFiles],
    shares: Sequence[float],
    about: int,
    rng: Generator,
    report: Report,
) -> tuple[list[Digest], int]:
    """Write the shards; return their blob ids and the tokens of each. Raises ConfigError for too little text."""
    drawn = [source.draw(share) for source, share in zip(sources, shares, strict=True)]
    total = sum(source.count(each) for source, each in zip(sources, drawn, strict=True))
    if total < MIN_TOKENS:
        raise ConfigError(f"only {total} tokens to train on", hint=f"give at least {MIN_TOKENS}")
    count = max(1, round(total / about))
    if count > MAX_SHARDS:
        raise ConfigError(
            f"{count} shards; at most {MAX_SHARDS} are legal",
            hint=f"give --shard-tokens {total // MAX_SHARDS + 1}",
        )
    size = total // count  # fewer than `count` tokens are left out
    documents = chain.from_iterable(_shuffled(sources, drawn, at, rng) for at in rng.permutation(FILES).tolist())
    names = list[Digest]()
    for at, each in enumerate(_cut(documents, size, count)):
        names.append(_write_shard(folder / shard_file(at), each))
        report("writing shards", at + 1, count, False)
    return names, size


def _shuffled(
    sources: Sequence[ShuffleFiles], drawn: Sequence[list[NDArray[np.bool_]]], at: int, rng: Generator
) -> Iterator[NDArray[np.generic]]:
    """The drawn documents in the `at`-th files of all sources, in random order."""
    found = [each for source, which in zip(sources, drawn, strict=True) for each in source.read(at, which[at])]
    return (found[number] for number in rng.permutation(len(found)).tolist())


def _cut(documents: Iterator[NDArray[np.generic]], size: int, count: int) -> Iterator[NDArray[np.generic]]:
    """The first `count` runs of `size` tokens, end to end."""
    waiting, have, cut = list[NDArray[np.generic]](), 0, 0
    for document in documents:
        waiting.append(document)
        have += len(document)
        if have < size:
            continue
        joined = np.concatenate(waiting)
        while len(joined) >= size and cut < count:
            yield joined[:size]
            joined, cut = joined[size:], cut + 1
        waiting, have = [joined], len(joined)


def _write_shard(path: Path, tokens_N: NDArray[np.generic]) -> Digest:
    with disk(path):
        with path.open("wb") as file:
            file.write(tokens_N.tobytes())
            file.flush()
            os.fsync(file.fileno())
        with path.open("rb") as file:
            return manifest_of_file(file).id


@contextmanager
def _new_folder(to: Path) -> Iterator[Path]:
    """A folder that is `to` once the block ends, and is removed where it fails."""
    folder = to.with_name(f".{to.name}.{os.getpid()}.new")
    with disk(folder):
        folder.mkdir(parents=True)
    try:
        yield folder
        sync_folder(folder)
        with disk(to):
            folder.rename(to)
        sync_folder(to.parent)
    except BaseException:
        with suppress(OSError):
            shutil.rmtree(folder)
        raise
