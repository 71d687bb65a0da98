"""Which entries count in a run: here, whose exclusions do."""

import pytest

from atoll.node.runs.presets import preset
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Round
from atoll.protocols.ledger.entry_rules import is_lawful
from atoll.protocols.ledger.records import Exclude, sign_entry

OWNER, ANN, BEN = (Identity(bytes([number]) * 32) for number in (1, 2, 3))
SPEC = preset("tiny", OWNER.peer_id, 1)


@pytest.mark.parametrize(
    ("author", "peer", "counts"),
    [(OWNER, ANN, True), (ANN, BEN, True), (ANN, ANN, False), (OWNER, OWNER, False), (ANN, OWNER, False)],
)
def test_nobody_excludes_the_owner_or_itself(author, peer, counts):
    entry = sign_entry(SPEC.id, author, 0, b"", Exclude(Round(3), peer.peer_id, ""))
    assert is_lawful(SPEC, entry) == counts
