"""Certificates of a run that bounds the newcomers of a set: one over the bound proves nothing."""

import pytest
from msgspec.structs import replace

from atoll.node.daemon.certificates import certificate
from atoll.node.daemon.certificates.certificate import FinalProof, gather, proven
from atoll.protocols import codec
from atoll.protocols.errors import ConfigError, DecodeError
from atoll.protocols.ids import Round, digest
from atoll.protocols.ledger.ballots import voter_order
from atoll.protocols.ledger.records import (
    AuditedContribution,
    Ballot,
    Epoch,
    Proposal,
    Vote,
    encode_entry,
    epoch_id,
    sign_entry,
)
from atoll.protocols.run.sections.audits import AuditSpec
from atoll_bench.experts.experts_members import identity_of
from tests.node.worker.session_home import SPEC

PEERS = [identity_of(number) for number in range(8)]
AUDIT = AuditSpec(voters=True, newcomers=1)
RUN = replace(
    SPEC,
    owner=PEERS[0].peer_id,
    audit=AUDIT,
    reduce=None,
    pace=replace(SPEC.pace, probation=4),
)


class Written:
    """What members wrote, each author's entries in one feed."""

    def __init__(self, spec):
        self.spec, self.entries = spec, []

    def say(self, author, body):
        mine = [entry for entry in self.entries if entry.author == author.peer_id]
        previous = mine[-1].id if mine else b""
        self.entries.append(sign_entry(self.spec.id, author, len(mine), previous, body))
        return self.entries[-1]

    def decide(self, at, authors, voters, epoch=b""):
        """These contribute, and the voters decide the set of all of them."""
        at, by_name = Round(at), {peer.peer_id: peer for peer in PEERS}
        names = sorted(self.say(peer, self.work(peer, at)).id for peer in authors)
        first = voter_order(self.spec.id, at, [peer.peer_id for peer in voters])[0]
        ballot = Ballot(0, first, epoch)
        proposed = self.say(by_name[first], Proposal(at, ballot, tuple(names), digest(b"state")))
        for peer in voters:
            self.say(peer, Vote(at, ballot, proposed.id))

    def work(self, peer, at):
        payload = digest(peer.peer_id.encode(), bytes([at]))
        return AuditedContribution(at, digest(b"base"), payload, 1, 64, 1, 2.0, verdicts=())

    def open_epoch(self, at, members, parent=b""):
        body = Epoch(Round(at), parent, tuple(sorted(peer.peer_id for peer in members)))
        for peer in members:
            self.say(peer, body)
        return body

    def gathered(self, last, path=()):
        about = lambda at: [entry for entry in self.entries if entry.body.round == at]  # noqa: E731
        return gather(self.spec, last, about, path)


def by_hand(spec, entries):
    """A certificate of round 0 that names all that was written."""
    signed = tuple(encode_entry(entry) for entry in sorted(entries, key=lambda entry: entry.id))
    return codec.encode(FinalProof(certificate.VERSION, (signed,), ()))


@pytest.mark.parametrize("newcomers", [1, 2])
def test_a_set_over_the_bound_is_neither_certified_nor_proven(newcomers):
    """The owner decides alone, and two that may not decide are in its set."""
    written = Written(replace(RUN, audit=replace(AUDIT, newcomers=newcomers)))
    written.decide(0, PEERS[:3], PEERS[:1])
    if newcomers == 2:
        assert proven(written.spec, written.gathered(0)).known == {peer.peer_id for peer in PEERS[:3]}
        assert proven(written.spec, by_hand(written.spec, written.entries)).round == 0
        return
    with pytest.raises(ConfigError, match="does not prove that round 0"):
        written.gathered(0)
    with pytest.raises(DecodeError, match="does not prove that round 0"):
        proven(written.spec, by_hand(written.spec, written.entries))


@pytest.mark.parametrize(
    ("first", "second", "is_proven"), [((1, 2, 3), (1,), True), ((1, 2), (1,), False), ((1,), (1, 2), True)]
)
def test_voters_of_all_epochs_that_could_decide_a_round_are_no_newcomers(first, second, is_proven):
    """The set of round 1 names members 1 to 3: of two epochs in a row that begin there, the second decides it."""
    written = Written(RUN)
    written.decide(0, PEERS[:2], PEERS[:1])
    before = written.open_epoch(1, [PEERS[at] for at in first])
    after = written.open_epoch(1, [PEERS[at] for at in second], epoch_id(before))
    others = PEERS[4:6] if len(second) == 1 and not is_proven else []
    written.decide(1, [*PEERS[1:4], *others], [PEERS[at] for at in second], epoch_id(after))
    if is_proven:
        found = proven(written.spec, written.gathered(1, (before, after)))
        assert (found.round, found.epochs) == (1, 2)
        return
    with pytest.raises(ConfigError, match="does not prove that round 1"):
        written.gathered(1, (before, after))
