"""Loads a tokenizer that travels with its run: an untrusted `tokenizer.json`, which is data and never code.

Only byte-pair encodings with known parts are run; an unknown part is refused by name. Expressions must be
harmless (see below), no part may lengthen a text much, and dropout, truncation and padding are off. The library
runs in a thread with a deadline. After the deadline the thread is abandoned and ends with the process. A panic of
the library is an error like others.

Regular expressions that could take exponential time are refused. The library's engine backtracks over every way
to match. The number of ways is exponential only if a repeated part can itself match in several ways, so only one
character, class or escape may be repeated; a group may be optional. Back-references, look-behind and rare
constructs are refused. The rest takes polynomial time, which the deadline bounds. The published patterns of all
models that we read pass.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from atoll.node.learning.data.tokens import SubwordTokenizer
from atoll.p2p.system.atomic_files import disk
from atoll.protocols.errors import ConfigError
from atoll.protocols.run.run_spec import TOKENIZER_MAX_BYTES

MAX_LETTERS = 2048
MAX_REPEATS = 64
"""Largest count of a counted repetition such as `{1,3}`."""
_OPENINGS = ("(?:", "(?i:", "(?=", "(?!")
_ESCAPE = re.compile(
    r"\\(?:[pP]\{\^?\w{1,32}\}|x\{[0-9a-fA-F]{1,6}\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[0DHSWdhstnrvfaebBAw]|[^\w\s])"
)
_TIMES = re.compile(r"\{(\d{1,4})?(,(\d{1,4})?)?\}")
T = TypeVar("T")
READ_S = 30.0
RUN_S = 80.0
"""Deadline for the whole text, seconds: nothing is trained before a worker has it."""
MAX_PADDING = 512
"""Most unused rows of a vocabulary: published models round it up."""
_ROWS = 64
"""Rows of an embedding that matrix units take at a time."""
MAX_PARTS = 16
_PARTS = {
    "normalizer": {"NFC", "Prepend", "Replace", "Sequence"},
    "pre_tokenizer": {"ByteLevel", "Digits", "Metaspace", "Sequence", "Split"},
}
_MEMBERS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers"}
"""Key under which a Sequence has its parts."""
_REPEATED = {"Digits", "Sequence", "Split"}
"""Kinds that cut text and never lengthen it. Each other kind may occur once."""


def check_pattern(pattern: str) -> None:
    """Raise ConfigError for an expression outside the allowed subset."""
    if len(pattern) > MAX_LETTERS:
        raise _refused(pattern, f"has more than {MAX_LETTERS} letters")
    at, after = 0, ""
    while at < len(pattern):
        at, after = _step(pattern, at, after)


def _step(pattern: str, at: int, after: str) -> tuple[int, str]:
    """The index after one part of the expression, and its kind: `one` letter, `group` end, `times` or nothing."""
    letter = pattern[at]
    if letter == "[":
        return _class_end(pattern, at), "one"
    if letter == "\\":
        return _escape_end(pattern, at), "one"
    if letter == "(":
        return _group_start(pattern, at), ""
    if letter in "*+?{":
        return _times_end(pattern, at, after)
    return at + 1, "group" if letter == ")" else "" if letter in "|^$" else "one"


def _times_end(pattern: str, at: int, after: str) -> tuple[int, str]:
    letter = pattern[at]
    if after == "times" and letter in "?+" and pattern[at - 1] in "*+?":
        return at + 1, ""  # lazy or possessive
    if after != "one" and not (after == "group" and letter == "?"):
        raise _refused(pattern, f"repeats a group or a repetition at {at}")
    if letter != "{":
        return at + 1, "times"
    found = _TIMES.match(pattern, at)
    if not found or max(int(found[1] or 0), int(found[3] or 0)) > MAX_REPEATS:
        raise _refused(pattern, f"has an odd repetition at {at}")
    return found.end(), "times"


def _group_start(pattern: str, at: int) -> int:
    if pattern[at + 1 : at + 2] != "?":
        return at + 1
    for opening in _OPENINGS:
        if pattern.startswith(opening, at):
            return at + len(opening)
    raise _refused(pattern, f"has a group of a rare kind at {at}")


def _escape_end(pattern: str, at: int) -> int:
    found = _ESCAPE.match(pattern, at)
    if not found:
        raise _refused(pattern, f"has a rare escape at {at}")
    return found.end()


def _class_end(pattern: str, at: int) -> int:
    depth = 0
    while at < len(pattern):
        if pattern[at] == "\\":
            at = _escape_end(pattern, at)
            continue
        if pattern.startswith(("[]", "[^]"), at):
            raise _refused(pattern, f"has an odd class at {at}")
        depth += {"[": 1, "]": -1}.get(pattern[at], 0)
        at += 1
        if not depth:
            break
    return at


def _refused(pattern: str, why: str) -> ConfigError:
    return ConfigError(f"tokenizer.json: the expression {pattern[:60]!r} {why}: it is not run")


class BoundedTokenizer:
    """A SubwordTokenizer with a deadline."""

    def __init__(self, inner: SubwordTokenizer) -> None:
        self._inner = inner
        self.identity = inner.identity

    def encode(self, text: bytes) -> NDArray[np.int32]:
        """As SubwordTokenizer.encode. Raises ConfigError after RUN_S."""
        return run_within(RUN_S, lambda: self._inner.encode(text))

    def encode_each(self, texts: list[bytes]) -> list[NDArray[np.int32]]:
        """As SubwordTokenizer.encode_each. Raises ConfigError after RUN_S."""
        return run_within(RUN_S, lambda: self._inner.encode_each(texts))

    def encode_sized(self, text: bytes) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """As SubwordTokenizer.encode_sized. Raises ConfigError after RUN_S."""
        return run_within(RUN_S, lambda: self._inner.encode_sized(text))


def load_tokenizer(path: Path, vocab: int) -> BoundedTokenizer:
    """Load the tokenizer of a file for a model with `vocab` tokens. Raises ConfigError, DiskFault."""
    with disk(path), path.open("rb") as file:
        data = file.read(TOKENIZER_MAX_BYTES + 1)
    return open_tokenizer(data, vocab)


def open_tokenizer(data: bytes, vocab: int) -> BoundedTokenizer:
    """Check and load the tokenizer of these bytes for a model with `vocab` tokens. Raises ConfigError."""
    found = _opened(data)
    ids = found.get_vocab(with_added_tokens=True).values()
    _check_vocab(len(set(ids)), max(ids, default=-1), vocab)
    return BoundedTokenizer(SubwordTokenizer(found, data))


def vocab_of(data: bytes) -> int:
    """Tokens of a model for the tokenizer of these bytes: a multiple of 64 if that is legal. Raises as above."""
    ids = _opened(data).get_vocab(with_added_tokens=True).values()
    largest = max(ids, default=-1)
    rounded = -(-(largest + 1) // _ROWS) * _ROWS
    vocab = rounded if rounded - len(set(ids)) <= min(MAX_PADDING, rounded // 16) else largest + 1
    _check_vocab(len(set(ids)), largest, vocab)
    return vocab


def _opened(data: bytes) -> Tokenizer:
    if len(data) > TOKENIZER_MAX_BYTES:
        raise ConfigError(f"tokenizer.json has more than {TOKENIZER_MAX_BYTES >> 20} MiB")
    _check_parts(_parsed(data))
    found = run_within(READ_S, lambda: Tokenizer.from_str(data.decode()))
    found.no_padding()
    found.no_truncation()
    found.post_processor = None  # it could repeat the whole text; we add no special tokens, so none is needed
    return found


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
