"""`inner.decay_steps`: which runs can have it, what is refused in one line; unset, run ids stay."""

import pytest
from msgspec.structs import replace

from atoll.protocols import codec
from atoll.protocols.errors import ConfigError
from atoll.protocols.run.run_spec import SPEC_VERSION, open_run, sign_run


def decaying(spec, **changes):
    """A run with a decay of 100 steps that ends with it, changed."""
    inner = {"decay_steps": 100, "warmup_steps": 10, "total_steps": spec.last_step, **changes}
    return replace(spec, version=SPEC_VERSION, inner=replace(spec.inner, **inner))


REFUSED = [
    ({"decay_steps": -1}, r"inner\.decay_steps"),
    ({"decay_steps": 1 << 32}, r"inner\.decay_steps"),
    ({"warmup_steps": 1 << 20}, r"decay_steps = 100 is too long: .*warmup_steps takes 1048576"),
    ({"total_steps": 99, "warmup_steps": 0}, r"decay_steps = 100 is too long"),
    ({"total_steps": 1 << 20}, r"total_steps is 1048576, but the run ends at inner step"),
    ({"first_step": 5}, r"inner\.total_steps is \d+, but the run ends"),
]


@pytest.mark.parametrize(("inner", "said"), REFUSED)
def test_a_decay_that_does_not_fit_the_run_is_refused_in_one_line(spec, owner, inner, said):
    with pytest.raises(ConfigError, match=said) as caught:
        sign_run(decaying(spec, **inner), owner)
    assert "\n" not in caught.value.line()


def test_a_decay_may_take_all_but_the_warm_up(spec, owner):
    whole = decaying(spec, warmup_steps=10, decay_steps=spec.last_step - 10)
    assert open_run(sign_run(whole, owner)) == whole
    with pytest.raises(ConfigError, match="too long"):
        decaying(spec, warmup_steps=10, decay_steps=spec.last_step - 9).check()


def test_a_rate_that_never_decays_needs_no_end(spec):
    decaying(spec, decay_steps=0, total_steps=7).check()


def test_a_run_without_a_decay_has_the_bytes_that_it_had(spec):
    assert b"decay_steps" not in codec.encode(spec)
    assert decaying(spec).id != replace(spec, inner=decaying(spec).inner, version=spec.version).id
    assert decaying(spec, decay_steps=0).id != decaying(spec).id
