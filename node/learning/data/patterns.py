"""Refuses untrusted regular expressions that could take exponential time.

The library's engine backtracks over every way to match. The number of ways is exponential only if a repeated part
can itself match in several ways, so only one character, class or escape may be repeated; a group may be optional.
Back-references, look-behind and rare constructs are refused. The rest takes polynomial time, which a deadline
(given.py) bounds. The published patterns of all models that we read pass.
"""

import re

from atoll.protocols.errors import ConfigError

MAX_LETTERS = 2048
MAX_REPEATS = 64
"""Largest count of a counted repetition such as `{1,3}`."""
_OPENINGS = ("(?:", "(?i:", "(?=", "(?!")
_ESCAPE = re.compile(
    r"\\(?:[pP]\{\^?\w{1,32}\}|x\{[0-9a-fA-F]{1,6}\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[0DHSWdhstnrvfaebBAw]|[^\w\s])"
)
_TIMES = re.compile(r"\{(\d{1,4})?(,(\d{1,4})?)?\}")


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
