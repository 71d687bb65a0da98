"""Loads a tokenizer that travels with its run: an untrusted `tokenizer.json`, which is data and never code.

Only byte-pair encodings with known parts are run; an unknown part is refused by name. Expressions must be
harmless (patterns.py), no part may lengthen a text much, and dropout, truncation and padding are off. The
library runs in a thread with a deadline. After the deadline the thread is abandoned and ends with the process. A
panic of the library is an error like others.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from atoll.node.learning.data.patterns import check_pattern
from atoll.node.learning.data.tokens import SubwordTokenizer
from atoll.protocols.errors import ConfigError, DiskFault
from atoll.protocols.run.run_spec import TOKENIZER_MAX_BYTES

T = TypeVar("T")

READ_S = 30.0
RUN_S = 80.0
"""Deadline for the whole text, seconds. A worker's whole start must end within `worker_process.START_S`."""
MAX_PADDING = 512
"""Most unused rows of a vocabulary: published models round it up."""
MAX_PARTS = 16
_PARTS = {
    "normalizer": {"NFC", "Prepend", "Replace", "Sequence"},
    "pre_tokenizer": {"ByteLevel", "Digits", "Metaspace", "Sequence", "Split"},
}
_MEMBERS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers"}
"""Key under which a Sequence has its parts."""
_REPEATED = {"Digits", "Sequence", "Split"}
"""Kinds that cut text and never lengthen it. Each other kind may occur once."""


class BoundedTokenizer:
    """A SubwordTokenizer with a deadline."""

    def __init__(self, inner: SubwordTokenizer) -> None:
        self._inner = inner
        self.vocab = inner.vocab
        self.identity = inner.identity

    def encode(self, text: bytes) -> NDArray[np.int32]:
        """As SubwordTokenizer.encode. Raises ConfigError after RUN_S."""
        return run_within(RUN_S, lambda: self._inner.encode(text))

    def encode_sized(self, text: bytes) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """As SubwordTokenizer.encode_sized. Raises ConfigError after RUN_S."""
        return run_within(RUN_S, lambda: self._inner.encode_sized(text))


def load_tokenizer(path: Path, vocab: int) -> BoundedTokenizer:
    """Load the tokenizer of a file for a model with `vocab` tokens. Raises ConfigError, DiskFault."""
    try:
        with path.open("rb") as file:
            data = file.read(TOKENIZER_MAX_BYTES + 1)
    except OSError as error:
        raise DiskFault(f"{path}: {error.strerror}") from error
    return open_tokenizer(data, vocab)


def open_tokenizer(data: bytes, vocab: int) -> BoundedTokenizer:
    """Check and load the tokenizer of these bytes for a model with `vocab` tokens. Raises ConfigError."""
    if len(data) > TOKENIZER_MAX_BYTES:
        raise ConfigError(f"tokenizer.json has more than {TOKENIZER_MAX_BYTES >> 20} MiB")
    _check_parts(_parsed(data))
    found = run_within(READ_S, lambda: Tokenizer.from_str(data.decode()))
    found.no_padding()
    found.no_truncation()
    found.post_processor = None  # it could repeat the whole text; we add no special tokens, so none is needed
    ids = found.get_vocab(with_added_tokens=True).values()
    _check_vocab(len(set(ids)), max(ids, default=-1), vocab)
    return BoundedTokenizer(SubwordTokenizer(found, vocab, data))


def run_within(limit_s: float, work: Callable[[], T]) -> T:
    """The result of `work`. Raises ConfigError if it takes longer or raises anything but MemoryError."""
    done: list[T] = []
    failed: list[BaseException] = []
    thread = Thread(target=_carry, args=(work, done, failed), daemon=True)
    thread.start()
    thread.join(limit_s)
    if done:
        return done[0]
    if not failed:
        raise ConfigError(f"tokenizer.json: it was not done within {limit_s:.0f} s", hint="use another tokenizer")
    if isinstance(failed[0], MemoryError):
        raise failed[0]
    raise ConfigError(f"tokenizer.json: {str(failed[0])[:200]}") from failed[0]


def _carry(work: Callable[[], T], done: list[T], failed: list[BaseException]) -> None:
    try:
        done.append(work())
    except BaseException as error:  # a panic of the library is no Exception
        failed.append(error)


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        whole = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"tokenizer.json is not JSON: {error}") from error
    if not isinstance(whole, dict):
        raise ConfigError("tokenizer.json is not a JSON object")
    return whole


def _check_parts(whole: dict[str, Any]) -> None:
    model = whole.get("model")
    if (
        not isinstance(model, dict)
        or model.get("type", "BPE") != "BPE"
        or not isinstance(model.get("merges"), list)
    ):
        raise ConfigError("tokenizer.json: its model is no byte-pair encoding (BPE), which alone is supported")
    if model.get("dropout"):
        raise ConfigError("tokenizer.json: model.dropout gives other tokens each time")
    for key, kinds in _PARTS.items():
        found = list(_flat(key, whole.get(key), kinds))
        writers = [kind for kind in found if kind not in _REPEATED]
        if len(found) > MAX_PARTS or len(set(writers)) < len(writers):
            raise ConfigError(f"tokenizer.json: its {key} has more parts than one may have")
    _check_patterns({key: value for key, value in whole.items() if key not in ("model", "added_tokens")})


def _flat(key: str, part: Any, kinds: set[str]) -> Iterator[str]:
    """Kinds of a part and of its own parts. Raises ConfigError for an unknown kind."""
    if part is None:
        return
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise ConfigError(f"tokenizer.json: {key} {str(kind)[:60]!r} is not supported")
    if any(len(str(part.get(written, ""))) > 1 for written in ("content", "prepend", "replacement")):
        raise ConfigError(f"tokenizer.json: {key} {kind} writes more than one letter")
    pattern = part.get("pattern")
    if kind == "Replace" and not (isinstance(pattern, dict) and pattern.get("String")):
        raise ConfigError(f"tokenizer.json: {key} Replace is supported for one text only, no expression")
    yield kind
    if kind == "Sequence":
        for one in _members(key, part):
            yield from _flat(key, one, kinds)


def _members(key: str, part: dict[str, Any]) -> list[Any]:
    found = part.get(_MEMBERS[key])
    if not isinstance(found, list):
        raise ConfigError(f"tokenizer.json: {key} Sequence has no list of {_MEMBERS[key]}")
    return found


def _check_patterns(value: Any) -> None:
    """Check every regular expression in a JSON value. Raises ConfigError."""
    if isinstance(value, dict):
        if isinstance(value.get("Regex"), str):
            check_pattern(value["Regex"])
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            _check_patterns(one)


def _check_vocab(count: int, largest: int, vocab: int) -> None:
    if largest >= vocab or vocab - count > min(MAX_PADDING, vocab // 16):
        raise ConfigError(
            f"tokenizer.json has {count} tokens up to {largest}, the model has {vocab}",
            hint="a checkpoint goes with the tokenizer that it was trained with",
        )
