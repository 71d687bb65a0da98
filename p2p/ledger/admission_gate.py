"""The door of a ledger: whose feed may begin here. A feed that has begun is never judged again.

Two rules, of different kinds:

- `refusal` depends on RunSpec and entry alone: the same on every replica and in every replay.
- A permit that has expired or is used up is not taken from a stranger, by our clock and our count. It is taken
  whenever a member brings it (somebody let its holder in while it was good), and by a newcomer during its first
  exchange, who cannot know members yet. So replicas that talk to a common member end with the same authors.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable

from atoll.protocols.ids import PeerId
from atoll.protocols.ledger.records import Admit, Entry
from atoll.protocols.run.admission import Rule, refusal, refusal_now
from atoll.protocols.run.run_spec import RunSpec

MAX_REFUSED = 256
"""Refused peers whose reason we keep."""


class AdmissionGate:
    """Decides on first entries. Holds counts and reasons, no entries."""

    def __init__(self, spec: RunSpec, me: PeerId, unix_s: Callable[[], float]) -> None:
        """`me` is never asked for a fresh permit: our own restored feed is as good as it ever was."""
        self._rule = Rule(spec.id, spec.owner, spec.admission)
        self._me = me
        self._unix_s = unix_s
        self._used: Counter[bytes] = Counter()
        self._refused: OrderedDict[PeerId, str] = OrderedDict()
        self.trusts_all = False
        """A newcomer's first exchange: genuine permits are taken from anybody."""

    @property
    def is_open(self) -> bool:
        """Everybody may write."""
        return self._rule.admission.mode == "open"

    def restore(self, authors: Container[PeerId], permits: Iterable[Admit]) -> None:
        """What the ledger held when it was opened."""
        self.trusts_all = self._me not in authors
        self._used.update(body.permit.key for body in permits)

    def admits_by_name(self, peer: PeerId) -> bool:
        """Owner, listed, or an open run."""
        return self._rule.admits_by_name(peer)

    def refusal(self, entry: Entry, *, vouched: bool) -> str:
        """Why `entry` may not be the first that we hold of its author; empty if it may.

        `vouched`: an admitted peer other than the author brought it.
        """
        if self.admits_by_name(entry.author):
            return ""
        if entry.seq and self._rule.admission.mode == "invite":
            return self._refused.get(entry.author, "")  # its permit may yet come
        body = entry.body
        permit, proof = (body.permit, body.proof) if isinstance(body, Admit) else (None, b"")
        reason = refusal(self._rule, entry.author, permit, proof)
        if not reason and permit is not None and not (vouched or self.trusts_all or entry.author == self._me):
            reason = refusal_now(permit, self._unix_s(), self._used[permit.key])
        return reason

    def record_first_entry(self, entry: Entry) -> None:
        """The ledger holds this first entry now."""
        self._refused.pop(entry.author, None)
        if isinstance(entry.body, Admit):
            self._used[entry.body.permit.key] += 1

    def refused(self, author: PeerId, reason: str) -> bool:
        """Remember why; True if this is news."""
        is_news = self._refused.get(author) != reason
        self._refused[author] = reason
        self._refused.move_to_end(author)
        if len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)
        return is_news

    def reason(self, peer: PeerId) -> str:
        """Why we store nothing of `peer`, if it tried; else empty."""
        return self._refused.get(peer, "")

    def own_refusal(self, body: object) -> str:
        """Why our own feed may not begin with `body`; empty if it may."""
        if self.admits_by_name(self._me):
            return ""
        permit, proof = (body.permit, body.proof) if isinstance(body, Admit) else (None, b"")
        return refusal(self._rule, self._me, permit, proof)
