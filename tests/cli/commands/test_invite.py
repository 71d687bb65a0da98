"""`invite` prints links that `start` understands, and says when a link would lead nowhere."""

import json
import time

import msgspec
import pytest

from atoll.cli.commands.invite import QR_MAX_COLUMNS, qr_text
from atoll.node.config.home import Home, hold_lock
from atoll.node.runs.invites import invite_text, store_invite
from atoll.protocols.identity import Identity
from atoll.protocols.ids import peer_id_of
from atoll.protocols.run.admission import Rule, verify_permit
from atoll.protocols.run.invite import decode_invite, invite_id, make_invite, read_invite, read_short, seeds_of
from atoll.protocols.run.run_spec import RunSpec, open_run, sign_run

MARKOV = ("--data", "synthetic:markov", "--seed", "1")
OTHER = peer_id_of(bytes([3]) * 32)
PUBLIC = f"/ip4/9.9.9.9/tcp/4710/p2p/{OTHER}"
OTHER_PUBLIC = f"/ip4/8.8.8.8/tcp/4710/p2p/{OTHER}"
DAY_S = 86400


@pytest.fixture
def spec(atoll, tmp_path) -> RunSpec:
    """A run of this home, by invitation."""
    assert atoll("run", "new", "tiny", *MARKOV, "--admission", "invite").code == 0
    return open_run((tmp_path / "home/runs/tiny.run").read_bytes())


def refused(ran, code: int, said: str) -> None:
    assert (ran.code, ran.out) == (code, "")
    assert said in ran.err
    assert ran.err.count("\n") == 1


def test_the_link_of_an_owner(atoll, spec):
    ran = atoll("invite", "--seed", PUBLIC, "--expires", "2d", "--for", "ann", "--members", "3")
    assert ran.code == 0, ran.err
    (line,) = ran.out.splitlines()
    invite = decode_invite(line, time.time())
    assert (invite.run, invite.signer, invite.seed_texts) == (spec.id, spec.owner, (PUBLIC,))
    assert invite.expires == pytest.approx(time.time() + 2 * DAY_S, abs=60)
    (token,) = invite.token
    assert (token.name, token.members, token.expires) == ("ann", 3, invite.expires)
    verify_permit(Rule(spec.id, spec.owner, spec.admission), token.permit)
    assert "joins tiny; valid 1 d 23 h; whoever has it may join: keep it private" in ran.err


def test_two_links_have_two_secrets(atoll, spec):
    links = [read_invite(atoll("invite", "--seed", PUBLIC).out) for _ in range(2)]
    assert links[0].token[0].secret != links[1].token[0].secret


def test_json_and_an_embedded_run(atoll, spec, tmp_path):
    about = json.loads(atoll("invite", "--seed", PUBLIC, "--embed", "--json").out)
    assert about["run"] == spec.id.hex()
    assert (about["signer"], about["seeds"]) == (spec.owner, [PUBLIC])
    assert (about["permit"], about["embedded"]) == (True, True)
    assert read_invite(about["invite"]).run_file == (tmp_path / "home/runs/tiny.run").read_bytes()


@pytest.mark.parametrize("expires", ["7", "d", "0d", "-1d", "7 d", "1y", "11000d"])
def test_times_that_are_none(atoll, spec, expires):
    ran = atoll("invite", "--seed", PUBLIC, "--expires", expires)
    assert ran.code == 2
    assert "is not a time like 12h, 7d or 4w" in ran.err


def test_what_cannot_be_invited_to(atoll, spec):
    refused(
        atoll("invite"), 78, "no node of this home trains tiny, so an invite would lead nowhere; start it with"
    )
    refused(atoll("invite", "--seed", "/ip4/1.2.3.4/tcp/1"), 78, "does not end in an address and /p2p/PEERID")
    refused(atoll("invite", "--run", "nope", "--seed", PUBLIC), 78, "no run is called 'nope' here")
    refused(atoll("invite", "--seed", PUBLIC, "--for", "x" * 33), 78, "at most 32 printable characters")


def test_a_node_that_starts_is_asked_again(atoll, spec, tmp_path):
    with hold_lock(Home(tmp_path / "home")):
        refused(atoll("invite"), 3, "starts or ends, and does not answer; ask again in a moment")
        assert atoll("invite", "--seed", PUBLIC).code == 0, "another node leads there"


def test_addresses_that_lead_nowhere_are_told(atoll, spec):
    local = f"/ip4/127.0.0.1/tcp/4710/p2p/{OTHER}"
    assert "work only on this machine" in atoll("invite", "--seed", local).err
    home = f"/ip4/192.168.1.5/tcp/4710/p2p/{OTHER}"
    assert "work only in your own network" in atoll("invite", "--seed", home).err
    assert "warning" not in atoll("invite", "--seed", PUBLIC).err


def test_a_running_node_is_its_own_seed(atoll, daemon, spec):
    status = msgspec.structs.replace(
        daemon.operator.state, run=spec.id.hex(), addresses=("/ip4/127.0.0.1/tcp/1", "/ip4/8.8.8.8/tcp/4710")
    )
    daemon.operator.state = status
    ran = atoll("invite")
    assert read_invite(ran.out).seed_texts == (f"/ip4/8.8.8.8/tcp/4710/p2p/{status.peer}",)
    daemon.operator.state = msgspec.structs.replace(status, addresses=())
    refused(atoll("invite"), 78, "the node has no address yet")
    daemon.operator.state = msgspec.structs.replace(status, run="ab" * 32)
    refused(atoll("invite", "--run", "tiny"), 78, "no node of this home trains tiny")


def test_a_member_passes_its_own_permit_on(atoll, tmp_path):
    owner = Identity(bytes([8]) * 32)
    assert atoll("run", "new", "mine", *MARKOV).code == 0
    mine = open_run((tmp_path / "home/runs/mine.run").read_bytes())
    theirs = msgspec.structs.replace(
        mine, name="theirs", owner=owner.peer_id, admission=msgspec.structs.replace(mine.admission, mode="invite")
    )
    home = Home(tmp_path / "home")
    home.run_file("theirs").write_bytes(sign_run(theirs, owner))
    ran = atoll("invite", "--run", "theirs", "--seed", PUBLIC)
    refused(ran, 78, f"only the owner of this run can make permits; ask {owner.peer_id} for an invite")

    from_owner = invite_text(theirs, owner, [PUBLIC], time.time())
    store_invite(home, theirs.id, from_owner)
    passed_on = read_invite(atoll("invite", "--run", "theirs", "--seed", PUBLIC, "--expires", "52w").out)
    assert passed_on.signer == json.loads(atoll("id", "show", "--json").out)["peer"]
    assert passed_on.token == read_invite(from_owner).token
    assert passed_on.expires == read_invite(from_owner).expires, "no longer than the permit"


def test_an_open_run_needs_no_permit(atoll):
    atoll("run", "new", "open", *MARKOV)
    ran = atoll("invite", "--seed", PUBLIC)
    assert read_invite(ran.out).token == ()
    assert "anybody may join" in ran.err


def test_the_code_fits_a_terminal_and_holds_capitals(atoll, spec):
    link = atoll("invite", "--seed", PUBLIC).out.strip()
    rows = qr_text(link).split("\n")
    assert len({len(row) for row in rows}) == 1
    assert len(rows[0]) <= 85
    assert len(rows) == -(-len(rows[0]) // 2)
    assert read_invite(link.upper()) == read_invite(link), "what a scanner reads"
    # The finder pattern, top left behind the quiet zone of 2: seven dark modules, then a light one.
    assert rows[0][:10] == "█" * 10
    assert rows[1][2:10] == " ▄▄▄▄▄ █"
    seeds = seeds_of([f"/dnsaddr/{'x' * 60}{number}.example.org" for number in range(8)])
    long = make_invite(Identity(bytes(32)), spec.id, seeds, 2_000_000_000, run_file=bytes(1500))
    assert qr_text(long) == "", f"more than {QR_MAX_COLUMNS} columns help nobody"


@pytest.fixture
def here(atoll) -> str:
    """A seed that is this home's own node."""
    return f"/ip4/9.9.9.9/tcp/4710/p2p/{json.loads(atoll('id', 'show', '--json').out)['peer']}"


@pytest.mark.parametrize("verb", [(), ("create",)])
def test_the_default_link_is_short(atoll, spec, here, verb):
    ran = atoll("invite", *verb, "--seed", here, "--qr")
    link, code = ran.out.split("\n", 1)
    assert len(link) <= 120
    assert qr_text(link) == code.rstrip("\n")
    about = json.loads(atoll("invite", *verb, "--seed", here, "--json").out)
    short = read_short(about["invite"])
    assert short is not None
    assert (short.id.hex(), list(short.maddrs)) == (about["id"], ["/ip4/9.9.9.9/tcp/4710"])
    assert invite_id(read_invite(about["link"])) == short.id
    long = atoll("invite", *verb, "--seed", here, "--embed").out.strip()
    assert open_run(read_invite(long).run_file).id == spec.id


def test_a_link_through_others_only_is_long_and_says_so(atoll, spec):
    ran = atoll("invite", "--seed", PUBLIC)
    assert read_invite(ran.out).seed_texts == (PUBLIC,)
    assert "this invite is long: a short one needs a direct address of this node" in ran.err


def test_what_was_given_out_is_listed_and_revoked(atoll, spec, here):
    assert "this home gave out no invite" in atoll("invite", "list").out
    about = json.loads(atoll("invite", "--seed", here, "--for", "ann", "--members", "2", "--json").out)
    (row,) = json.loads(atoll("invite", "list", "--json").out)
    assert (row["id"], row["run"], row["expires"]) == (about["id"], spec.id.hex(), about["expires"])
    assert (row["state"], row["permit"]) == ("valid", [{"for": "ann", "members": 2}])
    assert row["made"] == pytest.approx(time.time(), abs=60)
    _, line = atoll("invite", "list").out.splitlines()
    assert line.startswith(row["id"][:8])
    assert "tiny" in line
    assert "valid for 6 d 23 h" in line
    assert "ann, 2" in line
    ran = atoll("invite", "revoke", row["id"][:8])
    assert ran.code == 0, ran.err
    assert "is revoked: this node gives it to nobody any more" in ran.out
    assert "has its permit: members accept it until" in ran.err
    (row,) = json.loads(atoll("invite", "list", "--json").out)
    assert row["state"] == "revoked"
    assert json.loads(atoll("invite", "revoke", row["id"], "--json").out) == row, "again"
    refused(atoll("invite", "revoke", "zz"), 78, "no invite of this home begins")


def test_the_older_word_for_a_peer_works_with_a_hint_for_people(atoll, spec, monkeypatch):
    seeds = [json.loads(atoll("invite", flag, PUBLIC, "--json").out)["seeds"] for flag in ("--peer", "--seed")]
    assert seeds[0] == seeds[1]
    both = atoll("invite", "--seed", PUBLIC, "--peer", OTHER_PUBLIC, "--json")
    assert json.loads(both.out)["seeds"] == [OTHER_PUBLIC, PUBLIC]
    assert both.err == "" or "hint" not in both.err
    monkeypatch.setattr("atoll.cli.command_group.for_people", lambda: True)
    assert atoll("invite", "--seed", PUBLIC).err.startswith("hint: --seed is now --peer\n")
    assert "hint" not in atoll("invite", "--peer", PUBLIC).err
    assert "--seed" not in atoll("invite", "create", "--help").out
