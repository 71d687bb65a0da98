"""Admission to a ledger: decides whether the feed of an author may begin here. Later entries are not checked
again.

There are two rules:

- protocols' `refusal` depends on RunSpec and entry alone: the same on every replica and in every replay.
- An expired or used-up permit is refused from a stranger, by our clock and our count. It is accepted if a member
  brings it (somebody admitted its holder while it was valid), and by a newcomer during its first exchange, because
  it cannot know members yet. So replicas that talk to a common member end with the same authors.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable

from atoll.p2p.limits.bounded_table import put_newest
from atoll.protocols.ids import PeerId
from atoll.protocols.ledger.records import Admit, Entry, Solved
from atoll.protocols.run.admission import Permit, Rule, puzzle_refusal, refusal, refusal_now
from atoll.protocols.run.run_spec import RunSpec

MAX_REFUSED = 256
"""Most refused peers whose reason is remembered."""


class AdmissionGate:
    """Decides on the first entry of each feed. It stores counts and reasons, no entries."""

    def __init__(self, spec: RunSpec, me: PeerId, unix_s: Callable[[], float]) -> None:
        """`me`: our own PeerID; its restored feed needs no permit that is valid now. `unix_s`: wall clock."""
        self._rule = Rule(spec.id, spec.owner, spec.admission)
        self._me = me
        self._unix_s = unix_s
        self._used: Counter[bytes] = Counter()
        self._refused: OrderedDict[PeerId, str] = OrderedDict()
        self.trusts_all = False
        """During a newcomer's first exchange, genuine permits are accepted from any peer."""

    def restore(self, authors: Container[PeerId], permits: Iterable[Admit]) -> None:
        """Initialise from the authors and permits in the ledger when it is opened."""
        self.trusts_all = self._me not in authors
        self._used.update(body.permit.key for body in permits)

    def admits_by_name(self, peer: PeerId) -> bool:
        """Whether `peer` shows nothing: an open run without a puzzle, the owner, or a listed peer."""
        return self._rule.admits_by_name(peer)

    def refusal(self, entry: Entry, *, vouched: bool) -> str:
        """Reason why `entry` may not begin its author's feed here; empty if it may.

        `vouched`: an admitted peer other than the author sent it.
        """
        if self.admits_by_name(entry.author):
            return ""
        if entry.seq and self._rule.admission.mode != "allowlist":
            return self._refused.get(entry.author, "")  # its permit, or its solution, may still arrive
        permit, reason = self._genuine(entry.author, entry.body)
        if not reason and permit is not None and not (vouched or self.trusts_all or entry.author == self._me):
            reason = refusal_now(permit, self._unix_s(), self._used[permit.key])
        return reason

    def record_first_entry(self, entry: Entry) -> None:
        """Record that the ledger stored this first entry."""
        self._refused.pop(entry.author, None)
        if isinstance(entry.body, Admit):
            self._used[entry.body.permit.key] += 1

    def record_refusal(self, author: PeerId, reason: str) -> bool:
        """Remember the reason of a refusal; True if it is new."""
        is_news = self._refused.get(author) != reason
        put_newest(self._refused, author, reason, MAX_REFUSED)
        return is_news

    def refusal_reason(self, peer: PeerId) -> str:
        """Reason why entries of `peer` are refused; empty if it never tried."""
        return self._refused.get(peer, "")

    def own_refusal(self, body: object) -> str:
        """Reason why our own feed may not begin with `body`; empty if it may."""
        if self.admits_by_name(self._me):
            return ""
        return self._genuine(self._me, body)[1]

    def _genuine(self, author: PeerId, body: object) -> tuple[Permit | None, str]:
        """The permit in `body`, if any, and the reason why it never admits `author`."""
        if self._rule.admission.mode == "open":
            return None, puzzle_refusal(self._rule, author, body.nonce if isinstance(body, Solved) else None)
        permit, proof = (body.permit, body.proof) if isinstance(body, Admit) else (None, b"")
        return permit, refusal(self._rule, author, permit, proof)
