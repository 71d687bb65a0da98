"""The fold: Θ = Θ₀ + Σ U_r, where U_r depends on nothing but the set of contributions to round r.

`final` is the sum over final rounds, `view` adds the open ones. A set that changes is replaced: on the chunks that
its round covers the view gains U(new) − U(old), exactly, so order, duplicates and lateness leave no trace. Every
method either succeeds or leaves the state as it was.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from atoll.node.outer.fixed import SLAB_CHUNKS, plus, state_digest
from atoll.node.outer.padding import clear, padding_of
from atoll.protocols.arena import CHUNK, Arena
from atoll.protocols.coverage import Cover, size_of, slabs
from atoll.protocols.errors import Divergence
from atoll.protocols.ids import Digest


class Part(NamedTuple):
    """One contribution of a set."""

    entry: bytes
    """Entry id: equal ids are the same element."""
    weight: int
    source: Any
    """What the loader needs: a path, and what it does not have of the round."""


Load = Callable[[Any], tuple[Any, ...]]
"""What `Update` needs of a source beside the weight: a payload, or its tables. Raises DecodeError."""
Update = Callable[[Sequence[tuple[Any, ...]], int], Tensor]
"""U_r int32 `[chunks, 4096]` of a set's (weight, what was loaded …) and the chunks. Raises DecodeError."""


class _Open(NamedTuple):
    names: frozenset[tuple[bytes, int]]
    update_N4096: Tensor
    """Rows of the round's cover."""


class Fold:
    """Θ_final, the view and the open rounds. Keeps 4 bytes per value (of its cover) for each of them."""

    def __init__(
        self, theta_C4096: Tensor, arena: Arena, load: Load, update: Update, cover_of: Callable[[int], Cover]
    ) -> None:
        """`theta_C4096`: int32 Θ₀; see `adopt` to start later. `cover_of`: the chunks of a round's payloads."""
        self._padding = padding_of(arena)
        self._chunks = arena.chunks
        self._load = load
        self._update = update
        self._cover_of = cover_of
        self._open: dict[int, _Open] = {}
        self._heard: set[int] = set()
        self.final_round = -1
        self.final_C4096 = self.view_C4096 = self._checked(theta_C4096)

    @property
    def open_rounds(self) -> tuple[int, ...]:
        """Rounds that the view holds and `final` does not, rising."""
        return tuple(sorted(self._open))

    def holds(self, number: int) -> bool:
        """Whether the round is final, or a set of it was given since the start or the last `adopt`."""
        return number <= self.final_round or number in self._heard

    def state_digest(self) -> Digest:
        """Digest of Θ_final."""
        return state_digest(self.final_C4096)

    def view_digest(self) -> Digest:
        """Digest of the view."""
        return state_digest(self.view_C4096)

    def set_round(self, number: int, parts: Iterable[Part]) -> None:
        """S_number is now exactly `parts`. Raises DecodeError, Divergence."""
        if number <= self.final_round:
            raise Divergence(f"round {number} is final and cannot change")
        fresh = self._step(number, parts)
        terms = (1, fresh.update_N4096), *self._minus(number)
        view = plus(self.view_C4096, *terms, cover=self._cover_of(number))
        self.view_C4096 = view
        self._open[number] = fresh
        self._heard.add(number)
        if not fresh.names:
            del self._open[number]

    def check(self, number: int, parts: Iterable[Part]) -> Digest:
        """Digest that Θ_final(number) would have; nothing is kept. Raises DecodeError, Divergence."""
        self._follows(number)
        step = self._step(number, parts).update_N4096
        return state_digest(plus(self.final_C4096, (1, step), cover=self._cover_of(number)))

    def finalize(self, number: int, parts: Iterable[Part]) -> Digest:
        """S_number is final: Θ_final moves on. Returns its digest. Raises DecodeError, Divergence."""
        self._follows(number)
        step, cover = self._step(number, parts).update_N4096, self._cover_of(number)
        final = plus(self.final_C4096, (1, step), cover=cover)
        view = plus(self.view_C4096, (1, step), *self._minus(number), cover=cover)
        self._open.pop(number, None)
        self._heard.discard(number)
        self.final_C4096, self.view_C4096, self.final_round = final, view, number
        return self.state_digest()

    def adopt(self, theta_C4096: Tensor, number: int) -> None:
        """Replace everything by Θ_final(number); open rounds are forgotten. Raises Divergence."""
        theta = self._checked(theta_C4096)
        self._open.clear()
        self._heard.clear()
        self.final_C4096 = self.view_C4096 = theta
        self.final_round = number

    def _step(self, number: int, parts: Iterable[Part]) -> _Open:
        unique = {part.entry: part for part in parts}
        names = frozenset((part.entry, part.weight) for part in unique.values())
        known = self._open.get(number)
        if known is not None and known.names == names:
            return known
        cover = self._cover_of(number)
        loaded = [(part.weight, *self._load(part.source)) for part in unique.values()]
        update = self._update(loaded, size_of(cover))
        for at, span in slabs(cover, SLAB_CHUNKS):
            clear(update[at : at + span.stop - span.start], self._padding, span.start)
        return _Open(names, update)

    def _minus(self, number: int) -> list[tuple[int, Tensor]]:
        known = self._open.get(number)
        return [] if known is None else [(-1, known.update_N4096)]

    def _follows(self, number: int) -> None:
        if number != self.final_round + 1:
            raise Divergence(f"round {number} does not follow the final round {self.final_round}")

    def _checked(self, theta_C4096: Tensor) -> Tensor:
        if theta_C4096.shape != (self._chunks, CHUNK):
            raise Divergence(f"a state of shape {tuple(theta_C4096.shape)} for {self._chunks} chunks")
        return clear(theta_C4096.clone(), self._padding)
