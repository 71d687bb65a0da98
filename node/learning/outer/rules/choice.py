"""The rule that a run names: `outer.rule` of its RunSpec.

`sgd` and `average` keep nothing from round to round: they are Θ + U, which the fold does without a rule.

    sgd      Θ ← Θ − αΔ       SparseLoCo, arXiv 2508.15706
    average  Θ ← Θ − Δ        the mean of the members' weights: local SGD, arXiv 1805.09767
"""

from msgspec import UNSET

from atoll.node.learning.kernels.compiled import Fresh, fresh_like
from atoll.node.learning.outer.fixed import FRACTION_BITS
from atoll.node.learning.outer.rules.co2 import co2_step
from atoll.node.learning.outer.rules.momentum import Kernel, MomentumRule
from atoll.node.learning.outer.rules.nesterov import nesterov_step
from atoll.node.learning.outer.rules.slowmo import slowmo_step
from atoll.protocols.run.run_spec import OuterSpec

KERNELS: dict[str, Kernel] = {"nesterov": nesterov_step, "slowmo": slowmo_step, "co2": co2_step}
_WHOLE = 1 << 16


def rule_of(outer: OuterSpec, threads: int = 1, fresh: Fresh = fresh_like) -> MomentumRule | None:
    """The rule of a run, whose states are arrays of `fresh`; None for those without momentum."""
    if not outer.momenta:
        return None
    more: tuple[int, ...] = ()
    if outer.rule == "co2":
        gap_256 = 256 if outer.stale_256 is UNSET else outer.stale_256
        clip_65536 = _WHOLE if outer.clip_65536 is UNSET else outer.clip_65536
        more = (gap_256, clip_65536 << (FRACTION_BITS - 16))
    kernel = KERNELS[str(outer.rule)]
    momenta = outer.momenta
    return MomentumRule(kernel, outer.alpha_256, outer.beta_256, threads, fresh, momenta=momenta, more=more)
