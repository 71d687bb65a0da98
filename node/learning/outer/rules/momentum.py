"""What rules with momentum have in common: a state is Θ, then v, each int32 `[C, 4096]` in steps of 2⁻²⁴.

    v ← ⌊βv⌋₀ + Δ        Δ = Θ − (Θ + U), the mean; ⌊⌋₀ rounds towards zero

Rounding towards zero makes a momentum that gets nothing reach zero: to the nearest, 230/256 of 4 steps would be 4
steps for ever, and Θ would drift. Rows outside the cover of a round keep their Θ and their v, so a fragment has
the momentum of its own rounds (Streaming DiLoCo, arXiv 2501.18512). A rule may keep more arrays behind v.

Bounds: β·256 ≤ 2⁸, α·256 ≤ 2¹⁰, |Δ| < 2²⁸ (outer/mean.py), |v| ≤ 2³¹: no product below reaches 2⁵⁰.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from atoll.node.learning.kernels.compiled import Fresh, each_range, fresh_like, inlined
from atoll.protocols.errors import MODEL_LOST, Divergence
from atoll.protocols.ledger.coverage import Cover, size_of
from atoll.protocols.run.arena import CHUNK


@inlined
def towards_zero(value: Any) -> Any:
    """value / 256, rounded towards zero."""
    # A shift alone would round away from zero below it.
    return (value + ((value >> 63) & 255)) >> 8


@inlined
def nearest(value: Any, bits: int) -> Any:
    """value / 2^bits, to the nearest, halves away from zero."""
    return (value + (1 << (bits - 1)) + (value >> 63)) >> bits


Kernel = Callable[..., bool]
"""(Θ out, v out, …, Θ, v, …, Θ + U, α·256, β·256, …) of flat rows, int32, then whole numbers; False where a value
leaves int32."""


class MomentumRule(NamedTuple):
    """A rule with `momenta` arrays behind Θ; `threads` share the rows and cannot show in the result.

    `more`: what its kernel has beside α and β.
    """

    kernel: Kernel
    alpha_256: int
    beta_256: int
    threads: int = 1
    fresh: Fresh = fresh_like
    momenta: int = 1
    more: tuple[int, ...] = ()

    def step(self, state_S4096: Tensor, moved_N4096: Tensor, cover: Cover) -> Tensor:
        """See `outer.fold.OuterRule`: Θ, v … after a round, int32 `[S, 4096]`. Raises Divergence on overflow."""
        arrays = 1 + self.momenta
        chunks = len(state_S4096) // arrays
        out = self.fresh(state_S4096)
        if size_of(cover) != chunks:  # rows outside the cover stay; a whole round writes every value
            out.copy_(state_S4096)
        before, after, moved = (each.numpy().reshape(-1) for each in (state_S4096, out, moved_N4096))
        first = 0
        for span in cover:

            def work(start: int, stop: int, low: int = span.start, first: int = first) -> bool:
                firsts = [(low + start + at * chunks) * CHUNK for at in range(arrays)]
                own = [slice(at, at + (stop - start) * CHUNK) for at in firsts]
                rows = [values[part] for values in (after, before) for part in own]
                toward = moved[(first + start) * CHUNK : (first + stop) * CHUNK]
                return self.kernel(*rows, toward, self.alpha_256, self.beta_256, *self.more)

            if not all(each_range(span.chunks, self.threads, work)):
                raise Divergence("a weight or its momentum left its range of -128 … 128", hint=MODEL_LOST)
            first += span.chunks
        return out
