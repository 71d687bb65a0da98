"""What a user asks of a generation, and what its answer was. Nothing here needs torch."""

from typing import NamedTuple

MAX_TOKENS = 256
TEMPERATURE = 0.8
"""Where neither the user nor the model's publisher says one."""


class TextOptions(NamedTuple):
    """How to choose among tokens and when to stop; None: as the model's publisher says."""

    max_tokens: int = MAX_TOKENS
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()


class Answer(NamedTuple):
    """A generated text; `finish` is `length` where no more tokens were allowed, else `stop`."""

    text: str
    prompt_tokens: int
    tokens: int
    finish: str
