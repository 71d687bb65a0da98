"""What the process that writes a sample answers, and its bounds. Pure."""

import msgspec

MAX_TOKENS = 64
TEXT_CHARACTERS = 500
"""Most characters of a sample."""
ANSWER_BYTES = 16 << 10
"""Most bytes of an answer: the characters, and a line that says why there are none."""


class WrittenSample(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, one JSON object on stdout."""

    round: int = -1
    """The final round whose weights wrote it; -1: those that the run began with."""
    text: str = ""
    why: str = ""
    """Why there is no text, in one line."""


def printable(text: str, most: int = TEXT_CHARACTERS) -> str:
    """At most so many characters of a text; those that are neither printable nor the end of a line are `�`."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "\ufffd" for letter in text[:most])
