"""`objective`: what it cannot go with is refused when a run is made, in one line; unset, run ids stay."""

import math

import msgspec
import pytest
from msgspec import UNSET
from msgspec.structs import replace

from atoll.protocols import codec
from atoll.protocols.errors import ConfigError, DecodeError
from atoll.protocols.ids import RunId
from atoll.protocols.run.model_spec import ExpertsSpec
from atoll.protocols.run.run_spec import open_run, sign_run
from atoll.protocols.run.sections.compression import CompressSpec
from atoll.protocols.run.sections.objective import MAX_SETTINGS, ObjectiveSpec, seed_of_step

SIGREG = ObjectiveSpec(name="sigreg.1", weight=0.02)
OTHER = ObjectiveSpec(name="variance.2", weight=1.0, package="some-package")


def term(**more):
    return {"objective": replace(SIGREG, **more)}


def foreign(**more):
    return {"objective": replace(OTHER, **more)}


REFUSED = [
    (term(name="sigreg"), "objective.name"),
    (term(name="sigreg.0"), "objective.name"),
    (term(name="sigreg.1\n"), "objective.name"),
    (term(name="Sigreg.1"), "objective.name"),
    (term(name="sigreg.2"), "objective.package is for terms other than sigreg.1, and they need it"),
    (term(package="atoll-sigreg"), "objective.package is for terms other than sigreg.1"),
    (foreign(package=UNSET), "objective.package is for terms other than sigreg.1, and they need it"),
    (foreign(package="a b"), "objective.package"),
    (foreign(package="--index-url=x"), "objective.package"),
    (term(weight=0.0), "objective.weight"),
    (term(weight=-1.0), "objective.weight"),
    (term(weight=math.nan), "objective.weight|float"),
    (term(weight=1001.0), "objective.weight"),
    (term(settings=(("points", 17.0),)), "objective sigreg.1 has no setting 'points', only directions"),
    (term(settings=(("directions", 0.0),)), "directions = 0 is no whole number from 1 to 4096"),
    (term(settings=(("directions", 1.5),)), "directions = 1.5 is no whole number"),
    (term(settings=(("directions", 4097.0),)), "directions = 4097 is no whole number"),
    (foreign(settings=(("b", 1.0), ("a", 1.0))), "objective.settings must have each name once, in rising order"),
    (foreign(settings=(("a", 1.0), ("a", 1.0))), "objective.settings must have each name once"),
    (foreign(settings=(("A", 1.0),)), "objective.settings"),
    (foreign(settings=(("a\n", 1.0),)), "objective.settings"),
    (foreign(settings=tuple((f"s{at:02}", 1.0) for at in range(MAX_SETTINGS + 1))), "objective.settings"),
    (term() | {"optimizer": "spsa"}, "objective and inner.optimizer spsa cannot go together"),
    (term() | {"experts": True}, "objective and model.experts cannot go together"),
]
LEGAL = [
    term(),
    term(settings=(("directions", 4096.0),)),
    foreign(settings=(("a", -1.0), ("b_2", 0.5))),
    term() | {"optimizer": "muon"},
    foreign(settings=tuple((f"s{at:02}", 1.0) for at in range(MAX_SETTINGS))),
]


def changed(spec, more):
    more = dict(more)
    if more.pop("experts", False):
        spec = replace(spec, model=replace(spec.model, experts=ExpertsSpec(count=4, per_token=2, ffn=50)))
    optimizer = more.pop("optimizer", spec.inner.optimizer)
    spec = replace(spec, inner=replace(spec.inner, optimizer=optimizer))
    if optimizer == "spsa":
        spec = replace(
            spec,
            inner=replace(spec.inner, weight_decay=0.0, lr=1e-3),
            outer=replace(spec.outer, overlap_steps=0, overlap_most=UNSET),
            compress=CompressSpec(codec="scalar", k=512, feedback=0.0),
            reduce=None,
        )
    return replace(spec, **more)


@pytest.mark.parametrize(("more", "said"), REFUSED)
def test_what_a_term_cannot_go_with_is_refused_in_one_line(spec, owner, more, said):
    with pytest.raises(ConfigError, match=said) as caught:
        sign_run(changed(spec, more), owner)
    assert "\n" not in str(caught.value).replace("sigreg.1\n", "")


@pytest.mark.parametrize("more", LEGAL)
def test_what_works_is_a_run_that_opens_again(spec, owner, more):
    run = changed(spec, more)
    assert open_run(sign_run(run, owner)) == run


def test_a_run_without_a_term_has_the_bytes_that_it_had(spec):
    assert b"objective" not in codec.encode(spec)


def test_the_same_term_has_one_form(spec):
    """Defaults are left out, so two owners that mean the same have the same run."""
    tree = msgspec.to_builtins(SIGREG)
    assert tree == {"name": "sigreg.1", "weight": 0.02}
    with pytest.raises(DecodeError, match="canonical"):
        codec.decode(codec.encode(tree | {"settings": []}), ObjectiveSpec)
    with pytest.raises(DecodeError):
        codec.decode(codec.encode(tree | {"code": "import os"}), ObjectiveSpec)


def test_a_seed_follows_from_the_run_and_the_step():
    """Golden: members of other versions must draw the same."""
    run = RunId(bytes(range(32)))
    assert seed_of_step(run, 0) != seed_of_step(run, 1) != seed_of_step(RunId(bytes(32)), 1)
    assert seed_of_step(run, 7) == 8416204826466882413
