"""Every message and record has golden bytes, and they are those that were recorded."""

import ast
import re
from functools import cache
from typing import Any

import msgspec
import pytest

from atoll.p2p.discovery import dht_records
from atoll.protocols import codec, wires
from atoll.protocols.ledger import records, registers
from atoll.protocols.nat import Punch, check_punch
from atoll.protocols.run.invite import read_invite, read_short
from atoll.protocols.run.run_spec import SPEC_VERSION, open_run, sign_run
from tests.golden.__main__ import FOLDER, SOURCES, computed, recorded, rewrite
from tests.golden.messages import CASES, DENSE, JSON, ME, MIXTURE, RUN, UNIX_S, names
from tests.golden.reading import ROOT, nodes, parts, path_of, reads_sources, structs

NOT_SENT = {
    "cli/node_commands/last_end.py": "a line of the journal of this home's own node",
    "cli/stopped_node.py": "printed",
    "cli/top/reading.py": "printed",
    "node/config": "the user's own files, TOML and JSON",
    "node/daemon/consensus": "states in memory",
    "node/daemon/leaving": "states in memory",
    "node/daemon/loggers": "lines of JSON to the node's own child, and files of the user",
    "node/daemon/rounds": "states in memory",
    "node/daemon/standing_still": "states in memory",
    "node/daemon/web": "an answer to this machine's browser",
    "node/doctor": "printed",
    "node/guest": "values in memory",
    "node/learning": "values in memory; text files of the user",
    "node/runs": "values in memory",
    "node/serving/requests.py": "OpenAI's, from clients on this machine; its version is in the path (/v1)",
    "p2p/limits/config.py": "the user's own settings",
    "p2p/membership/address_book.py": "a cache of this node in JSON; without it the node starts anew",
    "p2p/nat/relay.py": "the user's own settings",
    "protocols/local/control_lines.py": "the version in front of a line",
    "protocols/local/control_messages.py": "lines of JSON: tests/protocols/local/test_control_messages.py",
    "protocols/local/standing.py": "parts of these lines",
    "protocols/local/privacy_now.py": "a part of these lines",
    "protocols/local/progress.py:RateNow": "a part of these lines",
    "protocols/local/progress.py:WorkProgress": "a part of these lines",
    "protocols/local/time_spent.py:Goodput": "a part of these lines",
    "protocols/local/time_spent.py:TimeShares": "a part of these lines",
    "node/ipc/start_clock.py": "a file of this node: without it a start has no estimate",
    "node/daemon/samples/written.py": "a line between this node and a process of its own, of one version",
    "node/worker/privacy/uses.py": "a file of this node: its golden bytes are tests/node/worker/test_privacy.py's",
    "protocols/ledger/ballots.py": "states in memory",
    "protocols/ledger/probation.py": "a state in memory",
    "protocols/wires.py": "the table of wires itself",
    "node/checkpoint/universal.py:_Versioned": "the version in front of a file",
    "p2p/ledger/newcomers.py:NewcomerQuota": "the node's own settings",
    "p2p/ledger/shares.py:Quota": "the node's own settings",
    "protocols/ledger/ownership.py:Announced": "a value in memory",
    "protocols/ledger/reduction.py:ReductionRules": "a value in memory",
    "protocols/local/worker_messages.py:_RoundSet": "what its subclasses share",
    "protocols/ledger/set_limit.py:Arrival": "in memory only: how this node came to know an author",
    "protocols/ledger/set_limit.py:Arrivals": "in memory only: what audits found, by address block",
    "protocols/ledger/set_limit.py:NewcomerOrder": "in memory only: what finality says of newcomers",
    "protocols/ledger/set_limit.py:Seniority": "in memory only: what finality says of authors",
    "protocols/ledger/turns.py": "a state in memory",
    "protocols/local/worker_messages.py:_RoundState": "what its subclasses share",
    "protocols/run/admission.py:Rule": "a value in memory",
    "protocols/run/arena.py": "values in memory",
    "protocols/run/model_spec.py:Atom": "a value in memory",
    "protocols/run/payload.py:Layout": "a value in memory",
    "protocols/run/run_spec.py:_Versioned": "the version in front of a RunSpec",
    "protocols/run/sized_payload.py": "values in memory; the bytes are in test_sizes.py",
    "protocols/run/slices.py:SlicePlan": "a value in memory",
}
"""Structs that are in no message or record with a version, by room, path, or path and name, with the reason."""


def is_of(struct: str, key: str) -> bool:
    return struct == key or struct.startswith((f"{key}/", f"{key}:"))


@reads_sources
def test_every_struct_has_golden_bytes_or_a_reason() -> None:
    values = (*(case.value for case in CASES.values()), *JSON)
    shown = {path_of(type(part)) for value in values for part in parts(value) if isinstance(part, msgspec.Struct)}
    assert len(shown) > 100
    assert shown <= structs(), "the sources were read wrongly"
    missing = sorted(struct for struct in structs() - shown if not any(is_of(struct, key) for key in NOT_SENT))
    assert not missing, f"no golden bytes (tests/golden/messages.py): {missing}"
    stale = sorted(key for key in NOT_SENT if not any(is_of(struct, key) for struct in structs()))
    assert not stale, f"reasons for nothing: {stale}"


@cache
def whole() -> Any:
    return computed("wires")


@pytest.mark.parametrize("part", recorded("wires"))
def test_the_bytes_are_those_that_were_recorded(part: str) -> None:
    assert whole().keys() == recorded("wires").keys()
    found, known = whole()[part], recorded("wires")[part]
    if isinstance(known, dict):
        assert found.keys() == known.keys(), "`python -m tests.golden rewrite wires` adds what is new"
        changed = [name for name in known if found[name] != known[name]]
        assert not changed, f"they need a new version, then `python -m tests.golden rewrite wires`: {changed}"
    assert found == known


@pytest.mark.parametrize("name", CASES)
def test_recorded_bytes_are_read_back(name: str) -> None:
    data = bytes.fromhex(recorded("wires")["messages"][name])
    assert codec.decode(data, CASES[name].kind) == CASES[name].value


def test_recorded_signatures_verify() -> None:
    """The domain of each signature is a part of the wire."""
    data = {name: bytes.fromhex(text) for name, text in recorded("wires")["messages"].items()}
    for name in (name for name in data if name.startswith("entry: ")):
        assert records.decode_entry(data[name], RUN) == CASES[name].value
    for name in (name for name in data if name.startswith("register: ")):
        assert registers.decode_register(data[name], RUN) == CASES[name].value
    for name in (name for name in data if name.startswith("DhtRecord: ")):
        assert dht_records.decode_record(data[name], UNIX_S) == CASES[name].value
    check_punch(codec.decode(data["Punch"], Punch))
    assert read_invite(recorded("wires")["invite"]) == CASES["Invite"].value
    seen = read_short(recorded("wires")["short invite"])
    assert seen is not None
    assert (seen.key, seen.maddrs[1]) == (ME.public_key, "/ip4/203.0.113.7/udp/4001/quic-v1")
    assert open_run(data["SignedRun"]).name == "golden"


@pytest.mark.parametrize("spec", [DENSE, MIXTURE], ids=["dense", "mixture"])
def test_the_recorded_runs_can_be_joined(spec: Any) -> None:
    assert spec.version == SPEC_VERSION
    assert open_run(sign_run(spec, ME)) == spec


@reads_sources
def test_every_protocol_id_is_recorded() -> None:
    """A protocol id comes from `protocols/wires.py`, or it is a literal, which is recorded too."""
    ids = recorded("wires")["protocol ids"]
    texts = {node.value for _, node in nodes() if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    literals = {text for text in texts if re.fullmatch(r"/atoll/[\w-]+/\d+", text)}
    assert literals
    assert literals <= {text for every in ids.values() for text in every}
    assert ids.keys() == names().keys()
    assert {wire.name for wire in vars(wires).values() if isinstance(wire, wires.Wire)} < ids.keys()


def test_golden_files_have_a_source() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == SOURCES.keys()


def test_rewriting_reports_what_changed(tmp_path: Any) -> None:
    lines: list[str] = []
    rewrite("wires", tmp_path, lines.append)
    assert lines
    assert all(line.startswith("new ") for line in lines)
    assert recorded("wires", tmp_path) == whole()
    path = tmp_path / "wires.json"
    path.write_text(path.read_text().replace('"/atoll/hold/1"', '"/atoll/hold/0"'))
    lines.clear()
    rewrite("wires", tmp_path, lines.append)
    assert lines == ["CHANGED  wires/protocol ids/hold/0"]


def test_nothing_but_the_command_writes_golden_files() -> None:
    """A test that writes what it compares with cannot fail."""
    writers = re.compile(r"GOLDEN\w*\.(write|open)|REWRITE_[A-Z]+\b.*environ|environ.*REWRITE_")
    tests = [path for path in (ROOT / "tests").rglob("*.py") if FOLDER not in path.parents]
    assert len(tests) > 100
    assert not [path for path in tests if writers.search(path.read_text(encoding="utf-8"))]
