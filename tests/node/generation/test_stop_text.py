"""A stop text ends a stream, whatever pieces it comes in."""

from hypothesis import given
from hypothesis import strategies as some

from atoll.node.generation.stop_text import StopText


def passed_on(pieces, stops):
    stop = StopText(stops)
    found = [stop.feed(piece) for piece in pieces]
    return "".join([*found, stop.rest()]), stop.found


def until_the_first(text, stops):
    """The law: read letter by letter, the stop text that is complete first ends it."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@given(some.lists(some.text("abc", max_size=5), max_size=8), some.lists(some.text("abc", max_size=4), max_size=3))
def test_nothing_of_it_and_nothing_after_it(pieces, stops):
    assert passed_on(pieces, stops) == until_the_first("".join(pieces), stops)


def test_what_cannot_begin_a_stop_text_is_passed_on_at_once():
    stop = StopText(["\nUser:"])
    assert stop.feed("Hello\nUs") == "Hello"
    assert stop.feed("ual") == "\nUsual"
    assert not stop.found
