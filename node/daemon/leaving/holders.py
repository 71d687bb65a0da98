"""Whether those that stay have what a leaving node has, and how long the node waits for that. Pure."""

from collections.abc import Collection, Mapping, Set
from enum import Enum

import msgspec

from atoll.protocols.ids import Digest, Round

STILL_S = 120.0
"""Longest wait without a sign that a member gets what it lacks: a worker may load for a minute and more."""
LONGEST_S = 240.0
"""Longest wait of all. `atoll stop --wait` waits for 300 s, and a unit as long."""
IN_VAIN_S = 5.0
"""Longest wait without such a sign where no member that stays can take what is lacking."""


class Needs(msgspec.Struct, frozen=True):
    """What a leaving node has that the others need to go on."""

    newest: Round = Round(-1)
    """Newest final round whose state they can have from here; -1: none."""
    final_sets: Mapping[int, frozenset[Digest]] = msgspec.field(default_factory=dict)
    """Payloads of the newest final rounds, by round; only rounds of which all are here, as wholes."""
    open_payloads: Mapping[int, frozenset[Digest]] = msgspec.field(default_factory=dict)
    """Payloads here that count, or may count, in rounds after `newest`, by round."""

    def blobs(self, final: int) -> frozenset[Digest]:
        """What a member with the state of round `final` lacks of this, or proves that state with."""
        first = min(final + 1, self.newest)
        sets = (names for number, names in self.final_sets.items() if first <= number <= self.newest)
        return self.open_after(final).union(*sets)

    def open_after(self, final: int) -> frozenset[Digest]:
        """Payloads of open rounds that a member with the state of round `final` may need."""
        return frozenset().union(*(names for number, names in self.open_payloads.items() if number > final))


class Stayer(msgspec.Struct, frozen=True):
    """A neighbour that took this node's ledger after its last entry, and had not left then; by its lease."""

    final: int
    """Newest final round that it knows, or -1."""
    round: int
    """Round that it works on."""
    offers_model: bool
    """Its lease names a snapshot."""
    is_voter: bool
    """It votes on the round after `Needs.newest`."""


class Lacking(msgspec.Struct, frozen=True):
    """What none of those that stay has."""

    records: bool = False
    """The ledger of this node."""
    model: bool = False
    payloads: int = 0
    text: bool = False
    can_come: bool = True
    """Whether somebody that stays could take the records, the model and the payloads."""

    def __bool__(self) -> bool:
        return self.records or self.model or self.payloads > 0 or self.text

    def words(self, newest: int) -> str:
        """What it is, for people."""
        parts = (
            (self.records, "the end of the run's records"),
            (self.model, f"the model of round {newest}"),
            (self.payloads > 0, f"{self.payloads} payloads of open rounds"),
            (self.text, "all of the run's text"),
        )
        return ", ".join(words for is_lacking, words in parts if is_lacking)


class Step(Enum):
    """What a leaving node does next."""

    END = "end"
    WAIT = "wait"
    GIVE_UP = "give up"


def find_lacking(
    needs: Needs, stayers: Collection[Stayer], held: Set[Digest], *, lacks_text: bool = False
) -> Lacking:
    """What those that stay lack together. `held`: the blobs that at least one of them offers whole."""
    if not stayers:
        return Lacking(records=True)
    has_model = needs.newest < 0 or any(_has_model(needs, stayer, held) for stayer in stayers)
    # Of a round that became final meanwhile they need nothing: the work in it was late.
    payloads = len(needs.open_after(max(stayer.final for stayer in stayers)) - held)
    # A relay follows the rounds and never has their states. All others that lack the model are fetching it.
    can_come = any(stayer.offers_model or stayer.is_voter or stayer.final < needs.newest for stayer in stayers)
    return Lacking(model=not has_model, payloads=payloads, text=lacks_text, can_come=can_come)


def _has_model(needs: Needs, stayer: Stayer, held: Set[Digest]) -> bool:
    if stayer.final >= needs.newest and stayer.offers_model:
        return True
    # Without a snapshot its lease proves nothing: a relay names final rounds too. A lease is also as old as its
    # round. So the payloads decide: with these it has folded the newest round, or can.
    first = min(stayer.final + 1, needs.newest)
    return all(_has_round(needs, stayer, held, number) for number in range(first, needs.newest + 1))


def _has_round(needs: Needs, stayer: Stayer, held: Set[Digest], number: int) -> bool:
    if number in needs.final_sets:
        return needs.final_sets[number] <= held
    # Of reduced rounds nobody has whole payloads. A voter that works on the next round has folded this one.
    return stayer.is_voter and stayer.round > number


def next_step(lacking: Lacking, waited_s: float, still_s: float) -> Step:
    """What to do after `waited_s` seconds, the last `still_s` of them without a sign of progress."""
    if not lacking:
        return Step.END
    can_come = lacking.can_come and (lacking.records or lacking.model or lacking.payloads > 0)
    limit_s = STILL_S if can_come else IN_VAIN_S
    return Step.GIVE_UP if waited_s >= LONGEST_S or still_s >= limit_s else Step.WAIT
