"""θ + U of a round's set, from the files of its payloads; or a rule's whole step in the same pass."""

from collections.abc import Iterable, Sequence
from operator import attrgetter

from msgspec import UNSET
from torch import Tensor

from atoll.node.checkpoint.disk import map_payload
from atoll.node.learning.compress.folding import OuterStep, Rows, rows_of
from atoll.node.learning.kernels.compiled import Fresh, fresh_like
from atoll.node.learning.outer.aggregation import Aggregation, aggregation_of
from atoll.node.learning.outer.fixed import plus
from atoll.node.learning.outer.fold import RoundSet
from atoll.node.learning.outer.isotropic import isotropic
from atoll.node.learning.outer.rules.landing import PLAIN, Landing, landing_of
from atoll.node.learning.outer.rules.momentum import MomentumRule
from atoll.node.worker.folding.reduction_work import SliceWork
from atoll.node.worker.sizes.codec import SizedCodec, codec_of_round
from atoll.node.worker.zeroth_order.scalar_update import moved_by_scalars
from atoll.protocols.errors import AtollError
from atoll.protocols.ledger.coverage import cover_of
from atoll.protocols.local.worker_messages import Member
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.payload import DENSE_BLOCK
from atoll.protocols.run.run_spec import OuterSpec, RunSpec
from atoll.protocols.run.sections.zeroth_order import is_scalar


class SetUpdate:
    """θ + U of a set from its payload files: by the run's codec, or slice by slice where a round was reduced."""

    def __init__(self, spec: RunSpec, slices: SliceWork | None, threads: int, fresh: Fresh = fresh_like) -> None:
        """`slices`: None in a run that reduces no rounds. `fresh` makes the arrays of the results."""
        self._spec = spec
        # A rule with momentum has the rate in its own step: it is given the mean as it is.
        alpha_256 = 256 if spec.outer.momenta else spec.outer.alpha_256
        self._step = OuterStep(alpha_256, spec.outer.floor_256)
        self._slices = slices
        self._threads = threads
        self._fresh = fresh

    def __call__(self, fresh: RoundSet, theta_N4096: Tensor) -> Tensor:
        """A new int32 array. Raises DecodeError, Divergence, CorruptFault where a payload is gone."""
        if fresh.slices:
            update_N4096 = require_slices(self._slices).update(fresh.slices, len(theta_N4096))
            return plus(theta_N4096, update_N4096, fresh=self._fresh)
        members = _weighed(fresh)
        if is_scalar(self._spec):
            return moved_by_scalars(
                self._spec, fresh.number, members, theta_N4096, threads=self._threads, fresh=self._fresh
            )
        judge = self._judge(fresh.number, members)
        moved_N4096 = self._folded(fresh.number, members, theta_N4096, judge=judge)
        if judge is not None:
            judge.shorten(moved_N4096, theta_N4096, self._step.alpha_256, self._threads)
        if self._spec.outer.spectrum:
            isotropic(moved_N4096, theta_N4096, arena_of(self._spec.model), cover_of(self._spec, fresh.number))
        return moved_N4096

    def in_one_pass(self, rule: MomentumRule, fresh: RoundSet, state_S4096: Tensor) -> Tensor | None:
        """The rule's step of the set, with any values in the padding; None where U is needed for itself."""
        outer, codec = self._spec.outer, self._spec.compress.codec
        if fresh.slices or is_scalar(self._spec) or codec in DENSE_BLOCK or outer.spectrum or _shortens(outer):
            return None
        members, cover = _weighed(fresh), cover_of(self._spec, fresh.number)
        landing = landing_of(rule, cover, len(state_S4096) // (1 + rule.momenta))
        judge = self._judge(fresh.number, members)
        return self._folded(fresh.number, members, state_S4096, judge=judge, landing=landing)

    def _folded(
        self,
        number: int,
        members: Sequence[Member],
        theta_N4096: Tensor,
        *,
        judge: Aggregation | None,
        landing: Landing = PLAIN,
    ) -> Tensor:
        codec = codec_of_round(self._spec, number)
        weights = [member.weight for member in members]
        payloads = [map_payload(member.path) for member in members]
        if isinstance(codec, SizedCodec):
            return codec.apply_update(
                theta_N4096, weights, payloads, self._step, threads=self._threads, fresh=self._fresh
            )
        return codec.apply_update(
            theta_N4096,
            weights,
            payloads,
            self._step,
            rows=[self._rows(number, member) for member in members],
            judge=judge,
            landing=landing,
            threads=self._threads,
            fresh=self._fresh,
        )

    def _judge(self, number: int, members: Iterable[Member]) -> Aggregation | None:
        if self._spec.outer.aggregate is UNSET:
            return None
        return aggregation_of(self._spec, number, (member.entry for member in members))

    def _rows(self, number: int, member: Member) -> Rows | None:
        if not member.experts:
            return None
        return rows_of(cover_of(self._spec, number, member.experts), cover_of(self._spec, number))


def _weighed(fresh: RoundSet) -> list[Member]:
    # A rule breaks ties by the order: it must be the same on every node. Who has no weight moves nothing.
    return sorted((member for member in fresh.members if member.weight), key=attrgetter("entry"))


def _shortens(outer: OuterSpec) -> bool:
    """Whether the mean is made shorter before the rule sees it."""
    return outer.aggregate == "edit"


def require_slices(slices: SliceWork | None) -> SliceWork:
    """The run's slices. Raises AtollError in a run that reduces no rounds."""
    if slices is None:
        raise AtollError("this run reduces no rounds")
    return slices
