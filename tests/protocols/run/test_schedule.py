"""`inner.decay_256`: what is refused in one line; unset, run ids stay."""

import pytest
from msgspec.structs import replace

from atoll.protocols import codec
from atoll.protocols.errors import ConfigError
from atoll.protocols.run.run_spec import open_run, sign_run


def decaying(spec, decay_256):
    """A run that decays in its last steps."""
    return replace(spec, inner=replace(spec.inner, decay_256=decay_256))


@pytest.mark.parametrize("decay_256", [-1, 257])
def test_a_share_that_is_none_is_refused_in_one_line(spec, owner, decay_256):
    with pytest.raises(ConfigError, match=r"inner\.decay_256") as caught:
        sign_run(decaying(spec, decay_256), owner)
    assert "\n" not in caught.value.line()


@pytest.mark.parametrize("decay_256", [0, 1, 256])
def test_any_share_fits_any_run(spec, owner, decay_256):
    short = replace(decaying(spec, decay_256), inner=replace(decaying(spec, decay_256).inner, total_steps=1))
    for run in (short, decaying(spec, decay_256)):
        assert open_run(sign_run(run, owner)) == run


def test_a_run_without_a_decay_has_the_bytes_that_it_had(spec):
    assert b"decay_256" not in codec.encode(spec)
    assert decaying(spec, 64).id != spec.id
    assert decaying(spec, 0).id != decaying(spec, 64).id
