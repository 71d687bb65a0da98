"""How far a round may run ahead of the fold that it overlaps with, and what came of it. Pure."""

from dataclasses import dataclass


@dataclass(slots=True)
class Overlap:
    """One round's view of the round `after` it, which may still be in flight."""

    after: int
    """Round whose fold is due; −1: none."""
    most: int
    """Inner steps that may be taken before it is in."""
    steps: int = 0
    """Steps that were."""
    held_s: float = 0.0
    is_due: bool = True

    def __post_init__(self) -> None:
        self.is_due = self.after >= 0

    def must_wait(self, taken: int, is_in: bool) -> bool:
        """Whether nothing may be done after `taken` steps before the fold is in."""
        return self.is_due and not is_in and taken >= self.most

    def met(self, taken: int) -> None:
        """The fold is in after `taken` steps."""
        self.is_due, self.steps = False, taken
