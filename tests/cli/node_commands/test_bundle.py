"""`atoll bundle`: all that helps with a bug, and nothing that must not leave the machine."""

import json
import tarfile

import msgspec
import pytest

from atoll.cli.node_commands import bundle
from atoll.node.config.home import Home
from atoll.node.doctor.checks import Finding
from atoll.node.doctor.redaction import forms_of
from atoll.p2p.system.key_file import load_or_create

INVITE = "atoll:aeaqgc2lxyz234567abcdefghijklmnopqrstuvwxyz234567"
HOST, IP4, IP6 = "otter.example.net", "203.0.113.77", "2001:db8:77::1"
OTHER = "12D3KooWJ5vB4gBiGCNCsqcMSLcYcDoqEEjRDA3cgQvCh6jzTfTi"
NAMES = "walrus", "narwhal"
"""What this node and the other one announce: no secrets, but a report has no PeerIDs either."""
PLACES = f"/ip4/{IP4}/tcp/4710/p2p/{OTHER}", f"/dns4/{HOST}/tcp/4710/p2p/{OTHER}", f"/ip6/{IP6}/tcp/4710"


def unpacked(path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        return {
            entry.name.removeprefix("atoll-bundle/"): archive.extractfile(entry).read().decode()
            for entry in archive.getmembers()
        }


@pytest.fixture
def planted(daemon, monkeypatch) -> list[str]:
    """Secrets and addresses in each part; what must not be found."""
    home = daemon.home
    key = load_or_create(home.identity)
    secrets = [*forms_of(home.identity.read_bytes()), INVITE, HOST, IP4, IP6, OTHER, key.peer_id, str(home.root)]
    text = " and ".join([*secrets, *PLACES])
    daemon.operator.state = msgspec.structs.replace(
        daemon.operator.state,
        peer=key.peer_id, addresses=PLACES, observed=PLACES, seeds={PLACES[1]: f"{HOST} refuses"}, trouble=text,
        contributors=(OTHER,), name=NAMES[0], names={OTHER: NAMES[1]},
    )  # fmt: skip
    daemon.operator.rows = [msgspec.structs.replace(row, contributors=(OTHER,)) for row in daemon.operator.rows]
    line = json.dumps({"time": "2026-01-02T03:04:05.678+00:00", "level": "info", "logger": "x", "message": text})
    home.log.write_text(f"{line}\n")
    (home.root / "crash.log").write_text(f"Traceback\n{text}\n")
    home.config_toml.write_text(
        f'# {text}\nseeds = ["{PLACES[0]}", "{PLACES[1]}"]\nport = 4710\nname = "{NAMES[0]}"\n'
    )
    folder = home.runs / ("ab" * 32)
    folder.mkdir()
    (folder / "worker.log").write_text(text)
    (folder / "invite").write_text(INVITE)
    monkeypatch.setattr(bundle, "findings", lambda _: [Finding("seeds", "fail", text)])
    return [*secrets, *NAMES]


def test_no_secret_and_no_address_is_in_any_part(atoll, daemon, planted, tmp_path):
    path = tmp_path / "report.tar.gz"
    ran = atoll("bundle", "-o", str(path))
    assert ran.code == 0, ran.err
    parts = unpacked(path)
    assert set(parts) == {
        "versions.json", "doctor.json", "status.json", "rounds.json", "node.log", "crash.log", "config.toml",
        "worker-abababab.log",
    }  # fmt: skip
    for name, text in parts.items():
        found = [secret for secret in planted if secret in text]
        assert not found, (name, found)
    for name in ("doctor.json", "status.json", "node.log", "crash.log", "config.toml", "worker-abababab.log"):
        assert "<secret>" in parts[name], name
        assert "<address>" in parts[name], name
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_helps_is_there(atoll, daemon, planted, tmp_path):
    path = tmp_path / "report.tar.gz"
    shown = json.loads(atoll("bundle", "-o", str(path), "--json").out)
    parts = unpacked(path)
    assert shown == {"path": str(path), "bytes": path.stat().st_size, "files": sorted(parts)}
    assert json.loads(parts["versions.json"])["packages"]["msgspec"]
    status = json.loads(parts["status.json"])
    assert (status["activity"], status["round"]) == ("collecting", 7)
    assert json.loads(parts["rounds.json"])[0]["contributors"] == status["contributors"], "one name in all parts"
    assert [row["round"] for row in json.loads(parts["rounds.json"])] == [6, 7]
    assert "port = 4710" in parts["config.toml"]
    assert "Traceback" in parts["crash.log"]


def test_a_node_that_never_ran_has_a_bundle_too(atoll, tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "findings", lambda _: [])
    monkeypatch.chdir(tmp_path)
    assert atoll("bundle").code == 0
    (path,) = tmp_path.glob("atoll-bundle-*.tar.gz")
    assert "no node runs" in json.loads(unpacked(path)["status.json"])["error"]
    ran = atoll("bundle", "-o", str(path))
    assert (ran.code, "is there already" in ran.err) == (78, True)


def test_a_key_that_redaction_lets_through_is_not_written(atoll, tmp_path, monkeypatch):
    home = Home(tmp_path / "home")
    home.make()
    load_or_create(home.identity)
    home.log.write_text(home.identity.read_bytes().hex())
    monkeypatch.setattr(bundle, "findings", lambda _: [])
    monkeypatch.setattr(bundle.Redaction, "text", lambda self, text: text)
    ran = atoll("bundle", "-o", str(tmp_path / "report.tar.gz"))
    assert (ran.code, "would be in node.log; nothing was written" in ran.err) == (1, True)
    assert not (tmp_path / "report.tar.gz").exists()


def test_a_long_log_is_cut_at_a_line(atoll, tmp_path, monkeypatch):
    home = Home(tmp_path / "home")
    home.make()
    home.log.write_bytes(b"first line\n" + b"x" * bundle.TAIL_BYTES + b"\nlast line\n")
    monkeypatch.setattr(bundle, "findings", lambda _: [])
    atoll("bundle", "-o", str(tmp_path / "report.tar.gz"))
    assert unpacked(tmp_path / "report.tar.gz")["node.log"] == "last line\n"
