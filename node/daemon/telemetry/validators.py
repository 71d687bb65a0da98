"""When this node validates, and whose validation losses it believes, so that it need not. Pure.

A validation is a claim: anybody can sign one. A node believes those whose value of some state was its own value of
that state too. Two that it believes and that disagree about a state are judged anew. What it believes changes what
is shown, and how often it validates; nothing that a run computes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from atoll.node.ipc.time_budget import TimeBudget
from atoll.node.runs.capacity.open_rounds import MOST_ROUNDS
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.ledger.registers import Validation

SHARE = 0.01
"""Largest share of the time that goes into validation where the user names no number of rounds."""
RELIEF_ROUNDS = 64
"""Who validated none of so many rounds relieves nobody, even if it lives: it may be stuck."""
TOLERANCE = 0.01
"""Largest difference of two values of one state, as a share: a GPU multiplies in bfloat16."""
OWN_STATES = MOST_ROUNDS
"""So many of the newest own values are remembered: as many rounds may be open before one is final."""


@dataclass(slots=True)
class EvaluationPace:
    """`every`: rounds from one validation to the next; 0: as SHARE allows. The last round is always validated."""

    every: int
    rounds: int
    budget: TimeBudget = field(default_factory=lambda: TimeBudget(SHARE))
    _trials: int = 0
    _next_trial: int = 0
    """First round that may be validated only to learn whom to believe."""

    def is_due(
        self,
        number: int,
        now: float,
        *,
        is_relieved: bool = False,
        is_in_doubt: bool = False,
        has_trained: bool = True,
    ) -> bool:
        """Return whether round `number`, which has closed, is to be validated at `now` (monotonic seconds).

        `is_relieved`: others validate, and this node believes them. `is_in_doubt`: it could believe one of them if
        it had a value of its own. `has_trained`: a round since its start, which others wait for longer than for a
        validation.
        """
        if number == self.rounds - 1:
            return True
        if self.every:
            return number % self.every == 0
        return (
            has_trained
            and not is_relieved
            and (self.budget.is_due(now) or (is_in_doubt and self._is_trial(number)))
        )

    def _is_trial(self, number: int) -> bool:
        """Twice as long after each trial: slow evaluators, or made-up ones, cost ever less."""
        if number < self._next_trial:
            return False
        self._trials += 1
        self._next_trial = number + (1 << min(self._trials, 20))
        return True


@dataclass(slots=True)
class Validators:
    """What this node found itself, what others say now, and who of them is believed."""

    own: dict[Digest, float] = field(default_factory=dict)
    """Own values by state, bits per byte, oldest first."""
    heard: Mapping[PeerId, Validation] = field(default_factory=dict)
    _verdicts: dict[PeerId, bool] = field(default_factory=dict)

    def find(self, state: Digest, val_bpb: float) -> None:
        """This node validated a state."""
        self.own.pop(state, None)
        self.own[state] = val_bpb
        for old in list(self.own)[:-OWN_STATES]:
            del self.own[old]
        self._judge()

    def hear(self, validations: Mapping[PeerId, Validation]) -> None:
        """These are the live validations of others."""
        self.heard = validations
        self._verdicts = {peer: verdict for peer, verdict in self._verdicts.items() if peer in validations}
        self._judge()

    @property
    def is_in_doubt(self) -> bool:
        """Whether nobody is believed, and a value of this node's own could show that somebody is to be."""
        return not self.believed and any(peer not in self._verdicts for peer in self.heard)

    @property
    def believed(self) -> dict[PeerId, Validation]:
        """The live validations of those that are believed, by peer, sorted."""
        return {peer: self.heard[peer] for peer in sorted(self.heard) if self._verdicts.get(peer, False)}

    def relieve(self, number: Round) -> bool:
        """Whether others that are believed validate, and did lately, when round `number` is at hand."""
        return any(said.round > number - RELIEF_ROUNDS for said in self.believed.values())

    def _judge(self) -> None:
        for peer, said in self.heard.items():
            if said.state in self.own:
                # One value that was wrong is enough: who is believed again after it could lie every other time.
                is_right = agree(said.val_bpb, self.own[said.state])
                self._verdicts[peer] = is_right and self._verdicts.get(peer, True)
        for peer in self._contradicted():
            del self._verdicts[peer]

    def _contradicted(self) -> set[PeerId]:
        """Those believed whose value of a state is not that of another one; one of the two is wrong."""
        values = dict[Digest, float]()
        for said in self.believed.values():
            values.setdefault(said.state, said.val_bpb)
        torn = {
            said.state for said in self.believed.values() if not agree(said.val_bpb, values[said.state])
        } - self.own.keys()
        return {peer for peer, said in self.believed.items() if said.state in torn}


def agree(one_bpb: float, other_bpb: float) -> bool:
    """Whether two validation losses may be of one state."""
    return abs(one_bpb - other_bpb) <= TOLERANCE * max(one_bpb, other_bpb)
