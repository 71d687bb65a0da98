"""What the voters of a round choose: a set, and what the proposal says with it about members. Pure."""

from typing import NamedTuple

from atoll.protocols.ids import Digest, PeerId
from atoll.protocols.ledger.records import Excised, ExcisingProposal, ExcludingProposal, Proposal


class Choice(NamedTuple):
    """What the voters of a round choose: with the states before it, this fixes the round's state."""

    names: tuple[Digest, ...]
    """Entry ids of the set."""
    excised: tuple[Excised, ...] = ()
    """Whose work the round's state takes out of the rounds before."""
    excluded: tuple[PeerId, ...] = ()
    """Whom the round's set excludes from the next round on."""

    @property
    def folded(self) -> "Choice":
        """What of it the round's state depends on."""
        return self._replace(excluded=()) if self.excluded else self


def choice_of(proposal: Proposal) -> Choice:
    """What a proposal proposes: two proposals of one choice name one state."""
    excised = proposal.excised if isinstance(proposal, ExcisingProposal) else ()
    excluded = proposal.excluded if isinstance(proposal, ExcludingProposal) else ()
    return Choice(proposal.contributions, excised, excluded)
