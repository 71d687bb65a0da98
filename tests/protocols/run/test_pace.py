"""`pace.arrival`: where no member could adapt it is refused in one line; unset, run ids stay."""

import msgspec
import pytest

from atoll.protocols import codec
from atoll.protocols.errors import ConfigError
from atoll.protocols.run.run_spec import open_run, sign_run

REFUSED = [
    ({"arrival": "group", "least_256": 256, "most_256": 256}, "group needs pace.least_256 or pace.most_256 other"),
    ({"arrival": "fastest"}, "arrival"),
    ({"arrival": ""}, "arrival"),
]
LEGAL = [
    {"arrival": "group", "least_256": 64},
    {"arrival": "group", "most_256": 512},
    {"arrival": "median"},
]


def changed(spec, pace):
    return msgspec.structs.replace(spec, pace=msgspec.structs.replace(spec.pace, **pace))


@pytest.mark.parametrize(("pace", "said"), REFUSED)
def test_a_pace_that_no_run_can_have_is_refused_in_one_line(spec, owner, pace, said):
    with pytest.raises(ConfigError, match=said) as caught:
        sign_run(changed(spec, pace), owner)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("pace", LEGAL)
def test_what_members_can_keep_is_a_run_that_opens_again(spec, owner, pace):
    run = changed(spec, pace)
    assert open_run(sign_run(run, owner)) == run


def test_a_run_without_it_has_the_bytes_that_it_had(spec):
    assert b"arrival" not in codec.encode(spec)
