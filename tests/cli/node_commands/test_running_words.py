"""How `start` says that others can join: by an invite, and only where one of this node's making admits them."""

from types import SimpleNamespace

import msgspec
import pytest

from atoll.cli.node_commands.running import _words
from atoll.node.config.home import Home
from atoll.node.config.node_config import NodeConfig
from atoll.node.runs.presets import preset
from atoll.protocols.identity import Identity
from atoll.protocols.run.admission import AdmissionSpec
from tests.cli.conftest import STATUS

OWNER, MEMBER = Identity(b"o" * 32), Identity(b"m" * 32)
NOW = msgspec.structs.replace(STATUS, addresses=("/ip4/9.9.9.9/tcp/4710",))


def words_of(tmp_path, who, mode, now=NOW):
    spec = msgspec.structs.replace(preset("tiny", OWNER.peer_id, 1), admission=AdmissionSpec(mode=mode))
    home = Home(tmp_path / "home")
    home.make()
    plan = SimpleNamespace(run=SimpleNamespace(spec=spec), identity=who, home=home, config=NodeConfig())
    return _words(plan)(now)


@pytest.mark.parametrize("who", [OWNER, MEMBER])
def test_any_member_of_an_open_run_shows_one_invite(tmp_path, who):
    (line,) = words_of(tmp_path, who, "open")
    assert line.startswith("others join with: atoll start atoll:")


def test_a_complete_run_invites_nobody(tmp_path):
    rounds = preset("tiny", OWNER.peer_id, 1).outer.rounds
    assert words_of(tmp_path, OWNER, "open", msgspec.structs.replace(NOW, final=rounds - 1)) == []
    assert words_of(tmp_path, OWNER, "open", msgspec.structs.replace(NOW, final=rounds - 2))


def test_members_of_a_run_by_invitation_promise_nothing(tmp_path):
    assert words_of(tmp_path, MEMBER, "invite") == []
    assert words_of(tmp_path, MEMBER, "allowlist") == []
    assert words_of(tmp_path, OWNER, "invite") == ["others join with an invite: `atoll invite`"]
