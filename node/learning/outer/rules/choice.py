"""The rule that a run names: `outer.rule` of its RunSpec.

`sgd` and `average` keep nothing from round to round: they are Θ + U, which the fold does without a rule.

    sgd      Θ ← Θ − αΔ       SparseLoCo, arXiv 2508.15706
    average  Θ ← Θ − Δ        the mean of the members' weights: local SGD, arXiv 1805.09767
"""

from atoll.node.learning.kernels.compiled import Fresh, fresh_like
from atoll.node.learning.outer.rules.momentum import Kernel, MomentumRule
from atoll.node.learning.outer.rules.nesterov import nesterov_step
from atoll.node.learning.outer.rules.slowmo import slowmo_step
from atoll.protocols.run.run_spec import OuterSpec

KERNELS: dict[str, Kernel] = {"nesterov": nesterov_step, "slowmo": slowmo_step}


def rule_of(outer: OuterSpec, threads: int = 1, fresh: Fresh = fresh_like) -> MomentumRule | None:
    """The rule of a run, whose states are arrays of `fresh`; None for those without momentum."""
    if not outer.momenta:
        return None
    return MomentumRule(KERNELS[str(outer.rule)], outer.alpha_256, outer.beta_256, threads, fresh)
