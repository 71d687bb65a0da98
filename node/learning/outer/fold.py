"""The fold: Θ = Θ₀ + Σ U_r, where U_r depends on nothing but the set of contributions to round r.

`final` is the sum over final rounds, `view` adds the open ones. A set that changes is replaced: on the chunks that
its round covers the view gains U(new) − U(old), exactly, so order, duplicates and lateness leave no trace. Every
method either succeeds or leaves the state as it was. No U is kept: the payloads that it follows from are on the
disk, and two hundred times smaller.

After some rounds Θ moves once more, by a function of Θ alone (experts are merged): Θ_r = M_r(Θ_{r−1} + U_r), where
the set of r is not empty. The view then is what the open rounds, taken in their order, make of `final`: still a
function of the sets and nothing else, the same before a round is final here and after. When a set changes at or
before such an open round, the open rounds are taken again, from `final`; else sums are enough.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atoll.node.learning.outer.fixed import SLAB_CHUNKS, plus, state_digest
from atoll.node.learning.outer.padding import clear, padding_of
from atoll.protocols.errors import CorruptFault, DecodeError, Divergence
from atoll.protocols.ids import Digest
from atoll.protocols.ledger.coverage import Cover, size_of, slabs
from atoll.protocols.run.arena import CHUNK, Arena, Span


class Part(NamedTuple):
    """One contribution of a set."""

    entry: bytes
    """Entry id: equal ids are the same element."""
    weight: int
    source: str
    """What `Onto` needs: a path."""
    rows: Any = None
    """Which rows of the payload belong to which chunks of the round; None: it has them all."""
    span: Span | None = None
    """The slice that it counts in; None: everywhere."""
    reduced: bool = False
    """It is a Reduction, and has values of its slice alone."""


Onto = Callable[[Sequence[Part], Tensor], Tensor]
"""θ + U_r, a new int32 array, of a set and of θ `[N, 4096]` on the chunks of its round. Raises DecodeError,
Divergence, CorruptFault for a payload that is not there."""

After = Callable[[int], Callable[[Tensor], None] | None]
"""What moves Θ, int32 `[C, 4096]`, in place after a round that is not empty; None: nothing does."""

_REPLAYED = 2
"""With so many open rounds, to take them all again costs no more than U(new) − U(old)."""


class _Set(NamedTuple):
    names: frozenset[tuple[bytes, int, Span | None]]
    parts: tuple[Part, ...]


class _Theta:
    """A state, int32 `[C, 4096]`, that is never changed in place; its digest is taken once."""

    __slots__ = ("_digest", "values_C4096")

    def __init__(self, values_C4096: Tensor) -> None:
        self.values_C4096 = values_C4096
        self._digest: Digest | None = None

    @property
    def digest(self) -> Digest:
        if self._digest is None:
            self._digest = state_digest(self.values_C4096)
        return self._digest


class Fold:
    """Θ_final, the view and the sets of the open rounds. Keeps 4 bytes per value for each of the first two."""

    def __init__(
        self,
        theta_C4096: Tensor,
        arena: Arena,
        onto: Onto,
        cover_of: Callable[[int], Cover],
        number: int = -1,
        after: After = lambda _: None,
    ) -> None:
        """`theta_C4096`: int32 Θ_final(number), −1 for Θ₀. `cover_of`: the chunks of a round's payloads."""
        self._padding = padding_of(arena)
        self._chunks = arena.chunks
        self._onto = onto
        self._cover_of = cover_of
        self._after = after
        self._open: dict[int, _Set] = {}
        self._heard: set[int] = set()
        self.final_round = number
        self._final = self._view = self._checked(theta_C4096)

    @property
    def final_C4096(self) -> Tensor:
        """Θ_final, int32; not to be changed."""
        return self._final.values_C4096

    @property
    def view_C4096(self) -> Tensor:
        """Θ_final and the open rounds, int32; not to be changed."""
        return self._view.values_C4096

    @property
    def open_rounds(self) -> tuple[int, ...]:
        """Rounds that the view holds and `final` does not, rising."""
        return tuple(sorted(self._open))

    def holds(self, number: int) -> bool:
        """Whether the round is final, or a set of it was given since the start or the last `adopt`."""
        return number <= self.final_round or number in self._heard

    def state_digest(self) -> Digest:
        """Digest of Θ_final."""
        return self._final.digest

    def view_digest(self) -> Digest:
        """Digest of the view."""
        return self._view.digest

    def set_round(self, number: int, parts: Iterable[Part]) -> None:
        """S_number is now exactly `parts`. Raises DecodeError, Divergence."""
        self.prepare_round(number, parts)()

    def prepare_round(self, number: int, parts: Iterable[Part]) -> Callable[[], Digest]:
        """The work of `set_round`: nothing changes before the result is called, which gives the view's digest.

        May run in a thread of its own, if nothing else changes the fold before the result is called.
        Raises DecodeError, Divergence.
        """
        if number <= self.final_round:
            raise Divergence(f"round {number} is final and cannot change")
        before, fresh = self._view, self._set_of(number, parts)
        view = self._view_with(number, fresh)
        digest = view.digest

        def commit() -> Digest:
            assert self._view is before, "the fold changed meanwhile"
            self._view = view
            self._open[number] = fresh
            self._heard.add(number)
            if not fresh.names:
                del self._open[number]
            return digest

        return commit

    def check(self, number: int, parts: Iterable[Part]) -> Digest:
        """Digest that Θ_final(number) would have; nothing is kept. Raises DecodeError, Divergence."""
        self._follows(number)
        return self._final_with(number, self._set_of(number, parts)).digest

    def finalize(self, number: int, parts: Iterable[Part]) -> Digest:
        """S_number is final: Θ_final moves on. Returns its digest. Raises DecodeError, Divergence."""
        return self.prepare_final(number, parts)()

    def prepare_final(self, number: int, parts: Iterable[Part]) -> Callable[[], Digest]:
        """The work of `finalize`, as `prepare_round` is that of `set_round`. Raises DecodeError, Divergence."""
        self._follows(number)
        before, fresh = self._view, self._set_of(number, parts)
        final = self._final_with(number, fresh)
        view = self._view_with(number, fresh) if self._open.keys() - {number} else final
        digest = final.digest

        def commit() -> Digest:
            assert self._view is before, "the fold changed meanwhile"
            self._view = view
            self._open.pop(number, None)
            self._heard.discard(number)
            self._final, self.final_round = final, number
            return digest

        return commit

    def adopt(self, theta_C4096: Tensor, number: int) -> None:
        """Replace everything by Θ_final(number); open rounds are forgotten. Raises Divergence."""
        theta = self._checked(theta_C4096)
        self._open.clear()
        self._heard.clear()
        self._final = self._view = theta
        self.final_round = number

    def _set_of(self, number: int, parts: Iterable[Part]) -> _Set:
        """The one that the round has, if it is that."""
        unique = {(part.entry, part.span): part for part in parts}
        names = frozenset((part.entry, part.weight, part.span) for part in unique.values())
        known = self._open.get(number)
        return known if known is not None and known.names == names else _Set(names, tuple(unique.values()))

    def _final_with(self, number: int, fresh: _Set) -> _Theta:
        """Θ_final(number). Without other open rounds that is the view: both are that function of the sets."""
        if fresh is self._open.get(number) and len(self._open) == 1:
            return self._view
        if not fresh.names:
            return self._final
        return _Theta(self._next(self.final_C4096, number, fresh))

    def _view_with(self, number: int, fresh: _Set) -> _Theta:
        """The view with this set in place of the one that the round has in it."""
        known = self._open.get(number)
        if known is fresh or (known is None and not fresh.names):
            return self._view
        if known is None and not self._moves_from(number):
            return _Theta(self._next(self.view_C4096, number, fresh))
        replayed = partial(self._replayed, {**self._open, number: fresh})
        if known is None or self._moves_from(number):
            return _Theta(replayed())
        exchanged = partial(self._exchanged, number, known, fresh)
        few = len(self._open) <= _REPLAYED
        try:
            return _Theta(replayed() if few else exchanged())
        except (CorruptFault, DecodeError):  # a payload of another open round, or one that is in no set any more
            return _Theta(exchanged() if few else replayed())

    def _moves_from(self, number: int) -> bool:
        """Whether some open round from this one on is followed by a move."""
        return any(self._after(at) is not None for at in self._open.keys() | {number} if at >= number)

    def _exchanged(self, number: int, known: _Set, fresh: _Set) -> Tensor:
        """The view + U(fresh) − U(known)."""
        gain_N4096, loss_N4096 = self._update(number, fresh), self._update(number, known)
        return plus(self.view_C4096, gain_N4096, loss_N4096, cover=self._cover_of(number))

    def _replayed(self, rounds: Mapping[int, _Set]) -> Tensor:
        theta_C4096 = self.final_C4096
        for number in sorted(rounds):
            theta_C4096 = self._next(theta_C4096, number, rounds[number])
        return theta_C4096

    def _next(self, theta_C4096: Tensor, number: int, fresh: _Set) -> Tensor:
        """What a round makes of the state before it: a new array, or that state if the set is empty."""
        if not fresh.names:
            return theta_C4096
        cover = self._cover_of(number)
        if size_of(cover) == self._chunks:
            out = clear(self._onto(fresh.parts, theta_C4096), self._padding)
        else:
            out = plus(theta_C4096, self._update(number, fresh), cover=cover)
        move = self._after(number)
        if move is not None:
            move(out)
        return out

    def _update(self, number: int, fresh: _Set) -> Tensor:
        """U int32 `[N, 4096]`, rows of the round's cover."""
        cover = self._cover_of(number)
        update = self._onto(fresh.parts, torch.zeros((size_of(cover), CHUNK), dtype=torch.int32))
        for at, span in slabs(cover, SLAB_CHUNKS):
            clear(update[at : at + span.stop - span.start], self._padding, span.start)
        return update

    def _follows(self, number: int) -> None:
        if number != self.final_round + 1:
            raise Divergence(f"round {number} does not follow the final round {self.final_round}")

    def _checked(self, theta_C4096: Tensor) -> _Theta:
        if theta_C4096.shape != (self._chunks, CHUNK):
            raise Divergence(f"a state of shape {tuple(theta_C4096.shape)} for {self._chunks} chunks")
        return _Theta(clear(theta_C4096.clone(), self._padding))
