"""What a node does for its run, by its local choices (docs/roles.md)."""

from typing import Literal, NamedTuple

Role = Literal["train", "evaluate", "seed", "relay"]


class Work(NamedTuple):
    """What follows from a node's roles. By default it trains."""

    trains: bool = True
    evaluates: bool = False
    """Whether it validates final rounds for the others."""
    has_model: bool = True
    """Whether it has a worker."""
    relays: bool = False
    seeds: bool = False
    """Whether it keeps what others may need: all of a packed text, too."""
    eval_every: int = 0
    """Rounds from one own validation to the next; 0: as often as that costs little."""

    @property
    def reads_text(self) -> bool:
        """Whether it needs the run's text: to train on, or to validate with."""
        return self.trains or self.evaluates

    @property
    def instead(self) -> str:
        """What the node does instead of training, in one line; empty: it trains."""
        if self.trains:
            return ""
        if not self.has_model:
            return "relays and keeps the ledger for others; it holds no model (role relay)"
        if self.evaluates:
            return "validates final rounds for the others and trains nothing (role evaluate)"
        return "keeps the model and payloads for the others and trains nothing (role seed)"


TRAINS = Work()


def work_of(roles: tuple[Role, ...], *, relay: bool, eval_every: int) -> Work:
    """The work of these roles; none: the node trains. `relay`: it relays beside them."""
    return Work(
        trains=not roles or "train" in roles,
        evaluates="evaluate" in roles,
        has_model=set(roles) != {"relay"},
        relays=relay or "relay" in roles,
        seeds="seed" in roles,
        eval_every=eval_every,
    )
