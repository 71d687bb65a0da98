"""The fold: Θ = Θ₀ + Σ U_r, where U_r depends on nothing but the set of contributions to round r.

`final` is the sum over final rounds, `view` adds the open ones. A set that changes is replaced: on the chunks that
its round covers the view gains U(new) − U(old), exactly, so order, duplicates and lateness leave no trace. Every
method either succeeds or leaves the state as it was. No U is kept: the payloads that it follows from are on the
disk, and two hundred times smaller.

After some rounds Θ moves once more, by a function of Θ alone (experts are merged): Θ_r = M_r(Θ_{r−1} + U_r), where
the set of r is not empty. The view then is what the open rounds, taken in their order, make of `final`: still a
function of the sets and nothing else, the same before a round is final here and after. When a set changes at or
before such an open round, the open rounds are applied again, from `final`; else sums are enough.

A final round may take the work of some members out of rounds before it (docs/removal.md): Θ also gains
Σ (U_r(smaller set) − U_r(set)), computed from the payloads of those rounds. The result has the bits of a fold in
which these rounds had the smaller sets all the time.

A rule with momentum (`rules/`) makes the state of a round from the state before and U: s_r = R(s_{r−1}, U_r),
where s is Θ with the momenta behind it. It is one array with one digest, saved and sent as one, so a state that is
replaced replaces its momentum too. An empty set is no step: s_r = s_{r−1}.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from atoll.node.learning.kernels.compiled import Fresh, fresh_like
from atoll.node.learning.outer.fixed import SLAB_CHUNKS, clear, padding_of, plus, state_digest
from atoll.protocols.errors import CorruptFault, DecodeError, Divergence
from atoll.protocols.ids import Digest
from atoll.protocols.ledger.coverage import Cover, size_of, slabs
from atoll.protocols.local.worker_messages import Member, Slice
from atoll.protocols.run.arena import CHUNK, Arena, Span


class RoundSet(NamedTuple):
    """What counts in one round: whole contributions, or what counts in each slice of a reduced round."""

    number: int
    members: tuple[Member, ...]
    slices: tuple[Slice, ...]
    names: frozenset[tuple[Digest, int, Span | None]]
    """Entry id, weight and slice of everything that counts: equal names give the same U."""


Shrunk = tuple[RoundSet, RoundSet]
"""What counted in a final round so far, and the smaller set that counts in it from now on."""

ApplyUpdate = Callable[[RoundSet, Tensor], Tensor]
"""θ + U_r, a new int32 array, of a set and of θ `[N, 4096]` on the chunks of its round. Raises DecodeError,
Divergence, CorruptFault for a payload that is not there."""

After = Callable[[int], Callable[[Tensor], None] | None]
"""What moves Θ, int32 `[C, 4096]`, in place after a round that is not empty; None: nothing does."""

TableAfter = Callable[[int], Callable[[Tensor, RoundSet], None] | None]
"""What writes the table of a state `[S, 4096]`, in place, from a round's set that is not empty; None: it stays."""


InOnePass = Callable[[RoundSet, Tensor], Tensor | None]
"""The state of a rule after a round, a new array, but for its padding; None where Θ + U must be made first."""


class OuterRule(Protocol):
    """A step whose size depends on the steps before it: a pure function of the state and U, in exact integers."""

    @property
    def momenta(self) -> int:
        """Arrays `[C, 4096]` that the state has behind Θ."""

    def step(self, state_S4096: Tensor, moved_N4096: Tensor, cover: Cover) -> Tensor:
        """The state after a round, a new int32 array, from Θ − mean on the rows of `cover`. Raises Divergence."""


_FEW_ROUNDS = 2
"""With so many open rounds, applying them all again costs no more than U(new) − U(old)."""


def round_set(number: int, members: Iterable[Member], slices: Iterable[Slice] = ()) -> RoundSet:
    """The set of these, each entry and each slice once."""
    whole = tuple({member.entry: member for member in members}.values())
    parts = tuple({each.span: each for each in slices}.values())
    names = [(member.entry, member.weight, None) for member in whole]
    sliced = [(m.entry, m.weight, part.span) for part in parts for m in (*part.reduced, *part.raw)]
    return RoundSet(number, whole, parts, frozenset([*names, *sliced]))


@dataclass(slots=True, eq=False)
class _Theta:
    """A state, int32 `[S, 4096]`: Θ, then the momenta of the rule. It is never changed in place.

    Its digest is computed once.
    """

    values_S4096: Tensor
    _digest: Digest | None = None

    @property
    def digest(self) -> Digest:
        if self._digest is None:
            self._digest = state_digest(self.values_S4096)
        return self._digest


class Fold:
    """Θ_final, the view and the sets of the open rounds. Each takes 4 bytes a value, and 4 for each momentum."""

    def __init__(
        self,
        theta_C4096: Tensor,
        arena: Arena,
        apply_update: ApplyUpdate,
        cover_of: Callable[[int], Cover],
        number: int = -1,
        after: After = lambda _: None,
        rule: OuterRule | None = None,
        fresh: Fresh = fresh_like,
        in_one_pass: InOnePass = lambda _, __: None,
        table_after: TableAfter = lambda _: None,
        table_rows: int = 0,
    ) -> None:
        """Start at the int32 state Θ_final(number), −1 for Θ₀. `cover_of`: chunks that payloads of a round cover.

        `rule`: None for Θ + U, where a state is Θ alone. With one, `apply_update` gives U for α = 1. `fresh` makes
        the arrays of states and of U; those of `apply_update` and of the rule are their own. `in_one_pass` gives
        the bits of the rule's step of `apply_update`. `table_rows` are behind all, for `table_after`.
        """
        self._in_one_pass = in_one_pass
        self._fresh = fresh
        self._rule = rule
        self._arrays = 1 + (rule.momenta if rule else 0)
        self._rows = arena.chunks * self._arrays + table_rows
        self._padding = padding_of(arena)
        self._chunks = arena.chunks
        self._apply_update = apply_update
        self._cover_of = cover_of
        self._after = after
        self._table_after = table_after
        self._open: dict[int, RoundSet] = {}
        self._known_rounds: set[int] = set()
        self.final_round = number
        self._final = self._view = self._checked(theta_C4096)

    @property
    def final_C4096(self) -> Tensor:
        """Θ_final, int32 `[C, 4096]`; not to be changed."""
        return self._final.values_S4096[: self._chunks]

    @property
    def final_state_S4096(self) -> Tensor:
        """Θ_final and the momenta of the rule behind it, int32 `[S, 4096]`; not to be changed."""
        return self._final.values_S4096

    @property
    def view_C4096(self) -> Tensor:
        """Θ_final moved by the open rounds, int32 `[C, 4096]`; not to be changed."""
        return self._view.values_S4096[: self._chunks]

    def holds(self, number: int) -> bool:
        """Whether the round is final, or a set of it was given since the start or the last `adopt`."""
        return number <= self.final_round or number in self._known_rounds

    def state_digest(self) -> Digest:
        """State digest of `final_state_S4096`."""
        return self._final.digest

    def view_digest(self) -> Digest:
        """State digest of the view, with the momenta that it has."""
        return self._view.digest

    def prepare_round(self, fresh: RoundSet) -> Callable[[], Digest]:
        """Compute the view with exactly this set in its round. Nothing changes before the result is called.

        The result gives the view's digest. This may run in a thread of its own, if nothing else changes the fold
        before the result is called. Raises DecodeError, Divergence.
        """
        number = fresh.number
        if number <= self.final_round:
            raise Divergence(f"round {number} is final and cannot change")
        before, fresh = self._view, self._known_or(fresh)
        view = self._view_with(fresh)
        digest = view.digest

        # Only assignments are left for the commit: it runs between two inner steps, which wait for it.
        def commit() -> Digest:
            assert self._view is before, "the fold changed meanwhile"
            self._view = view
            self._open[number] = fresh
            self._known_rounds.add(number)
            if not fresh.names:
                del self._open[number]
            return digest

        return commit

    def check(self, fresh: RoundSet, shrunk: Sequence[Shrunk] = ()) -> Digest:
        """Digest that Θ_final would have with this set; nothing is kept. Raises DecodeError, Divergence.

        `shrunk`: final rounds whose sets become smaller with this round.
        """
        self._check_follows(fresh.number)
        return self._corrected(self._final_with(self._known_or(fresh)), shrunk).digest

    def prepare_final(self, fresh: RoundSet, shrunk: Sequence[Shrunk] = ()) -> Callable[[], Digest]:
        """As `prepare_round`, but the result makes the round final and gives the digest of Θ_final.

        `shrunk`: see `check`. Raises DecodeError, Divergence.
        """
        number = fresh.number
        self._check_follows(number)
        before, fresh = self._view, self._known_or(fresh)
        final = self._corrected(self._final_with(fresh), shrunk)
        # Open rounds have no corrections, so the view gets them here, like the final state.
        view = self._corrected(self._view_with(fresh), shrunk) if self._open.keys() - {number} else final
        digest = final.digest

        def commit() -> Digest:
            assert self._view is before, "the fold changed meanwhile"
            self._view = view
            self._open.pop(number, None)
            self._known_rounds.discard(number)
            self._final = final
            self.final_round = number
            return digest

        return commit

    def adopt(self, state_S4096: Tensor, number: int, known: Digest | None = None) -> None:
        """Replace everything by the state Θ_final(number); open rounds are forgotten. Raises Divergence.

        The state is copied. `known`: its digest, if it is a verified state of a fold: then the array itself is
        used, and nobody may change it.
        """
        theta = self._checked(state_S4096) if known is None else _Theta(self._shaped(state_S4096), known)
        self._open.clear()
        self._known_rounds.clear()
        self._final = self._view = theta
        self.final_round = number

    def _known_or(self, fresh: RoundSet) -> RoundSet:
        """The set that the view has of the round, if it is the same one: then nothing needs to be computed."""
        known = self._open.get(fresh.number)
        return known if known is not None and known.names == fresh.names else fresh

    def _final_with(self, fresh: RoundSet) -> _Theta:
        """Θ_final(number). Without other open rounds that is the view: both are that function of the sets."""
        if fresh is self._open.get(fresh.number) and len(self._open) == 1:
            return self._view
        if not fresh.names:
            return self._final
        return _Theta(self._next(self._final.values_S4096, fresh))

    def _corrected(self, state: _Theta, shrunk: Sequence[Shrunk]) -> _Theta:
        """The state + Σ (U(after) − U(before)). Raises Divergence in a run where a sum is no exact correction."""
        if not shrunk:
            return state
        if self._rule is not None or any(self._is_followed(before.number) for before, _ in shrunk):
            raise Divergence("what a rule with momentum, or a merge, made of a round cannot be taken out")
        out = state.values_S4096
        for before, after in shrunk:
            out = plus(out, self._update(after), self._update(before), cover=self._cover_of(before.number))
        return _Theta(out)

    def _view_with(self, fresh: RoundSet) -> _Theta:
        """The view with this set in place of the one that the round has in it."""
        known = self._open.get(fresh.number)
        if known is fresh or (known is None and not fresh.names):
            return self._view
        # Sums of integers commute, so a new round is added to the view wherever it stands among the open ones;
        # a move is no sum: all rounds up to it must be under it before it is made.
        # The momentum of a rule is made in the order of rounds: only the newest one is added to what is there.
        is_next = not self._moves_from(fresh.number) if self._rule is None else self._is_newest(fresh.number)
        if known is None and is_next:
            return _Theta(self._next(self._view.values_S4096, fresh))
        replayed = partial(self._replayed, {**self._open, fresh.number: fresh})
        if known is None or self._rule is not None or self._moves_from(fresh.number):
            return _Theta(replayed())
        exchanged = partial(self._exchanged, known, fresh)
        # Both ways give the same bits, but they need other payloads: where one lacks a payload, the other is
        # tried.
        few = len(self._open) <= _FEW_ROUNDS
        try:
            return _Theta(replayed() if few else exchanged())
        except (CorruptFault, DecodeError):  # a payload of another open round, or one that is in no set any more
            return _Theta(exchanged() if few else replayed())

    def _is_newest(self, number: int) -> bool:
        """Whether all open rounds are before this one."""
        return all(at < number for at in self._open)

    def _moves_from(self, number: int) -> bool:
        """Whether some open round from this one on is followed by a move."""
        return any(self._is_followed(at) for at in self._open.keys() | {number} if at >= number)

    def _is_followed(self, number: int) -> bool:
        """Whether something that is no sum comes after the round."""
        return self._after(number) is not None or self._table_after(number) is not None

    def _exchanged(self, known: RoundSet, fresh: RoundSet) -> Tensor:
        """The view + U(fresh) − U(known), a new array."""
        # One pass with both terms: view + U(fresh) alone might leave int32 where the result does not.
        gain_N4096, loss_N4096 = self._update(fresh), self._update(known)
        view_S4096 = self._view.values_S4096
        return plus(view_S4096, gain_N4096, loss_N4096, cover=self._cover_of(fresh.number), fresh=self._fresh)

    def _replayed(self, rounds: Mapping[int, RoundSet]) -> Tensor:
        state_S4096 = self._final.values_S4096
        for number in sorted(rounds):
            state_S4096 = self._next(state_S4096, rounds[number])
        return state_S4096

    def _next(self, state_S4096: Tensor, fresh: RoundSet) -> Tensor:
        """The state after a round from the state before it: a new array, or that state if the set is empty."""
        if not fresh.names:
            return state_S4096
        cover = self._cover_of(fresh.number)
        if self._rule is not None:
            found = self._in_one_pass(fresh, state_S4096)
            if found is None:
                out = self._rule.step(state_S4096, self._moved(state_S4096, fresh), cover)
            else:
                out = self._whole(found)  # a rule keeps zeros where Θ, the momenta and U are zero
        elif size_of(cover) == self._chunks:
            out = clear(self._apply_update(fresh, state_S4096), self._padding)
        else:
            out = plus(state_S4096, self._update(fresh), cover=cover, fresh=self._fresh)
        # `out` is this call's own array: no state is ever changed in place, so a failed move leaves no trace.
        move = self._after(fresh.number)
        if move is not None:
            move(out[: self._chunks])
        write = self._table_after(fresh.number)
        if write is not None:
            write(out, fresh)
        return out

    def _update(self, fresh: RoundSet) -> Tensor:
        """U int32 `[N, 4096]`, rows of the round's cover."""
        cover = self._cover_of(fresh.number)
        zeros_N4096 = self._fresh(self._final.values_S4096[: size_of(cover)]).zero_()
        return self._cleared(self._apply_update(fresh, zeros_N4096), cover) if fresh.names else zeros_N4096

    def _moved(self, state_S4096: Tensor, fresh: RoundSet) -> Tensor:
        """Θ + U int32 `[N, 4096]`, rows of the round's cover: a pass less than zeros and U."""
        cover = self._cover_of(fresh.number)
        rows = [state_S4096[span.start : span.stop] for span in cover]
        return self._cleared(self._apply_update(fresh, rows[0] if len(rows) == 1 else torch.cat(rows)), cover)

    def _cleared(self, update: Tensor, cover: Cover) -> Tensor:
        # A payload may hold values in the padding: nothing forbids it, so nobody counts them.
        for at, span in slabs(cover, SLAB_CHUNKS):
            clear(update[at : at + span.chunks], self._padding, span.start)
        return update

    def _check_follows(self, number: int) -> None:
        if number != self.final_round + 1:
            raise Divergence(f"round {number} does not follow the final round {self.final_round}")

    def _shaped(self, state_S4096: Tensor) -> Tensor:
        if state_S4096.shape != (self._rows, CHUNK):
            raise Divergence(f"a state of shape {tuple(state_S4096.shape)} for {self._rows} chunks")
        return state_S4096

    def _checked(self, state_S4096: Tensor) -> _Theta:
        return _Theta(self._whole(self._fresh(self._shaped(state_S4096)).copy_(state_S4096)))

    def _whole(self, state_S4096: Tensor) -> Tensor:
        """A state whose padding is made zero, in place."""
        for first in range(0, self._arrays * self._chunks, self._chunks):
            clear(state_S4096[first : first + self._chunks], self._padding)
        return state_S4096
