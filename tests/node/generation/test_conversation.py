"""A conversation that is too long loses its oldest turns, never half of one."""

import pytest

from atoll.node.generation.conversation import newest_that_fit, plain_prompt
from atoll.protocols.errors import ConfigError

TURNS = [{"role": role, "content": f"{role} {at}"} for at in range(3) for role in ("user", "assistant")]
ASKED = [*TURNS, {"role": "user", "content": "last"}]
SYSTEM = {"role": "system", "content": "be short"}


def tokens_of(messages):
    return list(plain_prompt(messages).encode())


def test_lines_up_to_where_the_model_writes():
    assert plain_prompt(ASKED[:3]) == "User: user 0\nAssistant: assistant 0\nUser: user 1\nAssistant:"


def test_what_fits_stays_whole():
    assert newest_that_fit(ASKED, tokens_of, 1000) == (tokens_of(ASKED), 0)


@pytest.mark.parametrize("system", [[], [SYSTEM]])
def test_whole_turns_go_from_the_front(system):
    for kept in (5, 3, 1):
        wanted = tokens_of([*system, *ASKED[-kept:]])
        half_a_turn_more = len(tokens_of([*system, *ASKED[-kept - 1 :]]))
        found, left_out = newest_that_fit([*system, *ASKED], tokens_of, half_a_turn_more)
        assert (found, left_out) == (wanted, len(ASKED) - kept)


def test_a_message_that_is_too_long_alone_is_refused():
    with pytest.raises(ConfigError, match="longer than 10 tokens"):
        newest_that_fit(ASKED, tokens_of, 10)
