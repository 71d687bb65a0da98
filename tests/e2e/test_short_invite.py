"""A short invite of a running node: another one joins by it; without that node, or revoked, it is one line."""

import json

import pytest

from tests.e2e.conftest import TWO

pytestmark = pytest.mark.swarm


def refused(ended, code: int, *said: str) -> None:
    """Two lines: whom it asks, and why it ends."""
    first, last = ended.err.splitlines()
    assert ended.code == code
    assert first.startswith("asking ")
    assert last.startswith("error: ")
    for words in said:
        assert words in last


def test_a_short_invite_joins_the_run_of_its_node(nodes, until):
    owner, guest, late = nodes("owner"), nodes("guest"), nodes("late")
    owner.new_run("--admission", "invite", "--data", "synthetic:markov", *TWO)
    owner.start("--run", "tiny").up()
    about = json.loads(owner.atoll("invite", "create", "--members", "1", "--json").out)
    assert len(about["invite"]) <= 120
    other = json.loads(owner.atoll("invite", "create", "--json").out)
    assert owner.atoll("invite", "revoke", other["id"][:8]).code == 0
    refused(late.start_refused(other["invite"], "--yes"), 78, "it has expired or was revoked; ask for a new one")
    assert not late.home.root.exists()

    guest.start(about["invite"], "--yes").up()
    until("the owner counts two members", lambda: owner.status()["members"] == 2)
    until("a round of the guest is final", lambda: guest.final() >= 1)

    (broken,) = (path for path in owner.home.root.rglob(about["id"]) if path.is_file())
    whole = broken.read_bytes()
    broken.write_bytes(b"garbage")
    refused(late.start_refused(about["invite"], "--yes"), 78, "gives this invite to nobody any more")
    said = owner.said()
    assert "an invite is asked for that cannot be read" in said
    assert "Traceback" not in said
    broken.write_bytes(whole)

    owner.stop()
    alone = late.start_refused(about["invite"], "--yes")
    refused(alone, 75, "a short invite needs the node that made it", "atoll invite create --embed")
    assert not late.home.root.exists()
    guest.stop()
    guest.start(about["invite"], "--yes").up()
    guest.stop()
