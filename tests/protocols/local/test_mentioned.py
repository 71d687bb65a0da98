"""Names of the members that a status mentions: from their leases, and of nobody else."""

from msgspec.structs import replace

from atoll.protocols.ids import PeerId
from atoll.protocols.ledger.registers import Addresses, Lease
from atoll.protocols.local.mentioned import names_in
from atoll.protocols.local.standing import Exclusion, Standing, VotesAgainst
from tests.node.daemon.web.fed_node import new_status

LEASE = Lease("training", 4, 3, b"", -1, 812.5)


def test_members_that_are_mentioned_have_their_names_and_others_are_left_out():
    told = [PeerId(name) for name in ("author", "evaluator", "excluded", "voted", "diminished")]
    now = replace(
        new_status(),
        contributors=(told[0], "gone"),
        val_by=told[1],
        excluded=(Exclusion(peer=told[2], round=3, reason=""),),
        votes_against=(VotesAgainst(peer=told[3], votes=1, needed=2, by_us=False),),
        diminished=(Standing(peer=told[4]),),
    )
    live = {peer: replace(LEASE, name=f"the {peer}") for peer in (*told, PeerId("stranger"))}
    assert names_in(now, live) == {peer: f"the {peer}" for peer in told}
    assert names_in(now, {told[0]: LEASE, told[1]: Addresses(())}) == {}, "no name is no entry"
