"""Folds of rules with momentum: in one pass where a run allows it, with the digests of the fold that has none."""

import pytest
from msgspec.structs import replace

from atoll.node.learning.outer.fold import round_set
from atoll.node.worker.folding import set_update
from atoll.node.worker.folding.fold_requests import fold_of
from atoll.node.worker.folding.set_update import SetUpdate
from tests.node.worker.folding.fold_memory import payloads
from tests.node.worker.session_home import SPEC

CASES = {
    "nesterov": ({"alpha_256": 179}, {}, True),
    "slowmo": ({"momentum_256": 128}, {}, True),
    "co2": ({"clip_65536": 70}, {"codec": "sparse1"}, True),
    "nesterov, judged": ({"alpha_256": 179, "aggregate": "nnm"}, {}, True),
    "nesterov, dense": ({"alpha_256": 179}, {"codec": "int8", "k": 4096}, False),
    "nesterov, edit": ({"alpha_256": 179, "aggregate": "edit"}, {}, False),
}


@pytest.mark.parametrize("case", CASES)
def test_digests_are_those_of_a_fold_that_makes_theta_plus_u_first(case, tmp_path, monkeypatch):
    """Payloads have values in the padding, which no state may have."""
    outer, compress, expected = CASES[case]
    spec = replace(
        SPEC,
        outer=replace(SPEC.outer, rule=case.split(",")[0], **outer),
        compress=replace(SPEC.compress, **compress),
    )
    update = SetUpdate(spec, None, 2)
    landed, landing_of = list[int](), set_update.landing_of

    def counted(*args):
        landed.append(1)
        return landing_of(*args)

    monkeypatch.setattr(set_update, "landing_of", counted)
    members = payloads(spec, tmp_path)
    in_one, in_two = fold_of(spec, update, 2), fold_of(spec, lambda fresh, theta: update(fresh, theta))
    for number, some in enumerate((members[:2], members, members[1:], members[:1])):
        digests = [fold.prepare_final(round_set(number, some))() for fold in (in_one, in_two)]
        assert digests[0] == digests[1]
    assert bool(landed) is expected
