"""Conversations as prompts: in the model's own template, else as lines of `User:` and `Assistant:`."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from atoll.protocols.errors import ConfigError

Message: TypeAlias = Mapping[str, str]
"""One turn: `role` and `content`, as chat templates read it."""
PLAIN_STOP = "\nUser:"
"""Ends an answer where the model has no template."""


def plain_prompt(messages: Sequence[Message]) -> str:
    """The conversation as lines, up to where the model writes."""
    return "".join(f"{one['role'].capitalize()}: {one['content']}\n" for one in messages) + "Assistant:"


def newest_that_fit(
    messages: Sequence[Message], tokens_of: Callable[[Sequence[Message]], list[int]], most: int
) -> tuple[list[int], int]:
    """The prompt of at most `most` tokens, and how many messages at the front it leaves out, in whole turns.

    A system message stays. Raises ConfigError where the newest turn alone is too long.
    """
    first = 1 if messages and messages[0]["role"] == "system" else 0
    for left_out in range(0, len(messages) - first, 2):
        prompt = tokens_of([*messages[:first], *messages[first + left_out :]])
        if len(prompt) <= most:
            return prompt, left_out
    raise ConfigError(
        f"the message is longer than {most} tokens, which is what the model reads", hint="shorten it"
    )
