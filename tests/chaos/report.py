"""One line a case: its name and seed, whether it held, what was seen, and the line that plays it again."""

from dataclasses import dataclass, field


class NotRun(Exception):
    """This machine lacks what the case needs; the message says what. It is no pass."""


@dataclass(slots=True)
class Result:
    """How a case went."""

    case: str
    seed: int
    seen: str
    broken: list[str] = field(default_factory=list)
    """A line for each broken promise."""
    is_run: bool = True
    undecided: str = ""
    """Why it was run and shows nothing."""

    @property
    def holds(self) -> bool:
        """Whether it was run, shows something, and nothing is broken."""
        return self.is_run and not self.broken and not self.undecided

    def lines(self, words: str = "") -> list[str]:
        """The line of the case, then each broken promise, then how to play it again. `words`: further options."""
        failed = "BROKEN" if self.broken else "UNSURE" if self.undecided else "NOT RUN"
        found = [
            f"{'ok' if self.holds else failed:<8} {self.case:<12} seed {self.seed}: {self.seen}",
            *(f"  {one}" for one in self.broken),
            *([f"  {self.undecided}"] if self.undecided else []),
        ]
        if not self.holds:
            found.append(f"  again: python -m tests.chaos --only {self.case} --seed {self.seed}{words}")
        return found
