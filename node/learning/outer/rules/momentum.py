"""What rules with one momentum have in common: a state is Θ, then v, each int32 `[C, 4096]` in steps of 2⁻²⁴.

    v ← ⌊βv⌋₀ + Δ        Δ = Θ − (Θ + U), the mean; ⌊⌋₀ rounds towards zero

Rounding towards zero makes a momentum that gets nothing reach zero: to the nearest, 230/256 of 4 steps would be 4
steps for ever, and Θ would drift. Rows outside the cover of a round keep their Θ and their v, so a fragment has
the momentum of its own rounds (Streaming DiLoCo, arXiv 2501.18512).

Bounds: β·256 ≤ 2⁸, α·256 ≤ 2¹⁰, |Δ| < 2²⁸ (outer/mean.py), |v| ≤ 2³¹: no product below reaches 2⁵⁰.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from atoll.node.learning.kernels.compiled import Fresh, Ints32, each_range, fresh_like
from atoll.protocols.errors import MODEL_LOST, Divergence
from atoll.protocols.ledger.coverage import Cover, size_of
from atoll.protocols.run.arena import CHUNK

Kernel = Callable[[Ints32, Ints32, Ints32, Ints32, Ints32, int, int], bool]
"""(Θ out, v out, Θ, v, Θ + U, α·256, β·256) of flat rows; False where a value leaves int32."""


class MomentumRule(NamedTuple):
    """A rule with one momentum array; `threads` share the rows and cannot show in the result."""

    kernel: Kernel
    alpha_256: int
    beta_256: int
    threads: int = 1
    fresh: Fresh = fresh_like

    @property
    def momenta(self) -> int:
        """One array behind Θ."""
        return 1

    def step(self, state_S4096: Tensor, moved_N4096: Tensor, cover: Cover) -> Tensor:
        """See `outer.fold.OuterRule`: Θ and v after a round, int32 `[2C, 4096]`. Raises Divergence on overflow."""
        chunks = len(state_S4096) // 2
        out = self.fresh(state_S4096)
        if size_of(cover) != chunks:  # rows outside the cover stay; a whole round writes every value
            out.copy_(state_S4096)
        before, after, moved = (each.numpy().reshape(-1) for each in (state_S4096, out, moved_N4096))
        first = 0
        for span in cover:

            def work(start: int, stop: int, low: int = span.start, first: int = first) -> bool:
                theta = slice((low + start) * CHUNK, (low + stop) * CHUNK)
                own = slice(theta.start + chunks * CHUNK, theta.stop + chunks * CHUNK)
                toward = moved[(first + start) * CHUNK : (first + stop) * CHUNK]
                return self.kernel(
                    after[theta], after[own], before[theta], before[own], toward, self.alpha_256, self.beta_256
                )

            if not all(each_range(span.chunks, self.threads, work)):
                raise Divergence("a weight or its momentum left its range of -128 … 128", hint=MODEL_LOST)
            first += span.chunks
        return out
