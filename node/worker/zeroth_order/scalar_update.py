"""θ + U of a round's set in a zeroth-order run, from its payload files and from who sent them."""

from collections.abc import Sequence

from torch import Tensor

from atoll.node.checkpoint.disk import map_payload
from atoll.node.learning.kernels.compiled import Fresh
from atoll.node.learning.zeroth_order.scalar_fold import ScalarStep, apply_scalars
from atoll.protocols.local.round_sets import Member
from atoll.protocols.run.payload import Layout
from atoll.protocols.run.run_spec import RunSpec
from atoll.protocols.run.sections.zeroth_order import seed_of, unit_of


def moved_by_scalars(
    spec: RunSpec, number: int, members: Sequence[Member], theta_C4096: Tensor, *, threads: int, fresh: Fresh
) -> Tensor:
    """A new int32 array. Raises DecodeError, Divergence, CorruptFault where a payload is gone."""
    # A rule with momentum has the rate in its own step: it is given the mean as it is.
    alpha_256 = 256 if spec.outer.momenta else spec.outer.alpha_256
    return apply_scalars(
        theta_C4096,
        [member.weight for member in members],
        [map_payload(member.path) for member in members],
        [seed_of(spec.id, number, member.author) for member in members],
        Layout(spec.compress.codec, len(theta_C4096), spec.compress.k),
        ScalarStep(alpha_256, unit_of(spec.inner.lr, spec.inner.clip)),
        threads=threads,
        fresh=fresh,
    )
