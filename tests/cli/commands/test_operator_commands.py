"""Commands that ask a running node, over the real protocol."""

import contextlib
import io
import json
import socket
import threading

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console

from atoll.cli.client import ask, call, stream
from atoll.cli.commands.status import PEER_HEAD, facts, one_line, peer_cells
from atoll.cli.live_panel import is_news, new_addresses
from atoll.cli.node_commands.panel_screen import render
from atoll.node.config.home import Home
from atoll.node.daemon.control_server import MAX_CONNECTIONS
from atoll.protocols.errors import ConfigError, NotRunning
from atoll.protocols.local.control_messages import (
    GetLogs,
    GetStatus,
    Goodput,
    LogLines,
    PeerStatus,
    Room,
    RoundStatus,
    Status,
    TimeShares,
    Watch,
)
from atoll.protocols.local.privacy_now import PrivacyNow
from atoll.protocols.local.progress import RateNow, WorkProgress
from atoll.protocols.local.standing import Exclusion, LedgerUse, Standing, VotesAgainst


@contextlib.contextmanager
def idle_connections(home, count):
    """So many programs that ask nothing, served or waiting to be."""
    with contextlib.ExitStack() as links:
        for _ in range(count):
            link = links.enter_context(socket.socket(socket.AF_UNIX))
            link.connect(str(home.control_socket))
        yield


@pytest.mark.parametrize("words", ["status", "run rounds"])
def test_a_node_with_too_many_connections_is_not_said_to_be_gone(atoll, daemon, words):
    """It said "no node runs here; start it", and other commands believed that."""
    with idle_connections(daemon.home, MAX_CONNECTIONS):
        ran = atoll(*words.split())
    assert (ran.code, ran.out) == (1, "")
    assert "32 programs are connected to this node already; end some" in ran.err


def test_a_node_that_hangs_with_many_who_wait_for_it_is_not_said_to_be_elsewhere(atoll, tmp_path):
    """A monitor that asks a stopped node each second fills what the kernel lets wait."""
    home = Home(tmp_path / "home")
    home.make()
    with socket.socket(socket.AF_UNIX) as hangs:
        hangs.bind(str(home.control_socket))
        hangs.listen(0)
        with idle_connections(home, 1):
            ran = atoll("status")
            assert atoll("logs").code == 5, "it wrote none"
            write_log(home, "its last line")
            assert "its last line" in atoll("logs").out, "from its disk"
    assert (ran.code, ran.err) == (5, "error: the node does not answer; look at its log with `atoll logs`\n")


def test_status_says_what_and_why(atoll, daemon):
    ran = atoll("status")
    assert ran.code == 0
    assert "round 7 of 54: collecting – waiting for 1 of 4, about 2.5 s left" in ran.out
    assert "4 members, 3 connections (3 direct)" in ran.out
    assert "up 1.5 MB, down 900 B, payload 19.7 kB" in ran.out
    assert "42 kB a round and node: 2.13 payloads, 52 × below fp32 weights; a copy costs 1.003 ×" in ran.out


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"final": -1, "digest": "", "contributors": ()}, "agreed    no round is final yet"),
        ({}, "agreed    final round 5, digest cdcdcdcdcdcdcdcd by 1"),
        (
            {"unsettled": "round 6 waits for the vote of …abcdef"},
            "          round 6 waits for the vote of …abcdef",
        ),
        (
            {"roles": ("evaluate", "relay"), "validated": 1, "tokens": 0},
            "roles     evaluate, relay; validated 1 round, served 0 B",
        ),
        (
            {"val_bpb": 2.5, "val_round": 4, "val_by": "12D3KooWpeer-abcdefgh"},
            "model     loss 2.500, validation 2.500 bits per byte of round 4, by …abcdefgh",
        ),
        (
            {"val_bpb": 2.5, "val_round": 4, "val_by": "12D3KooWpeer-abcdefgh"}
            | {"names": {"12D3KooWpeer-abcdefgh": "seal"}},
            "model     loss 2.500, validation 2.500 bits per byte of round 4, by …abcdefgh seal",
        ),
        (
            {"diminished": (Standing(peer="12D3KooWpeer-abcdefgh", why="1 of 3 rounds"),)}
            | {"names": {"12D3KooWpeer-abcdefgh": "seal"}},
            "member    …abcdefgh seal: 1 of 3 rounds",
        ),
        ({"members": 1, "peers": 1, "paths": {}}, "swarm     1 member, 1 connection"),
        (
            {"activity": "finished", "round": 53, "reason": "the run is complete"},
            "now       all 54 rounds: finished – the run is complete, about 2.5 s left",
        ),
        (
            {"learning_rate": RateNow(rate=0.002, phase="stable", step=31, until=400)},
            "rate      0.002, stable until step 400 (now 31)",
        ),
        (
            {"privacy": PrivacyNow(epsilon=4.3771, delta=1e-5, uses=1, most=None)},
            "privacy   ε 4.38 of this node alone at δ 1e-05 for each sequence, used in 1 step at most",
        ),
        (
            {"privacy": PrivacyNow(epsilon=17.8566, delta=1e-5, uses=10, most=20.0)},
            "privacy   ε 17.9 of this node alone at δ 1e-05 for each sequence, "
            "used in 10 steps at most; no round beyond 20",
        ),
        (
            {"privacy": PrivacyNow(epsilon=17.8566, delta=1e-5, uses=10, most=20.0, spent=True)},
            "privacy   ε 17.9 of this node alone at δ 1e-05 for each sequence, "
            "used in 10 steps at most; no round beyond 20, so none "
            "any more",
        ),
        (
            {"activity": "paused", "reason": "by the operator", "eta_s": None},
            "now       round 7 of 54: paused – by the operator, time left unknown",
        ),
        (
            {
                "activity": "catching up",
                "reason": "fetching the base",
                "eta_s": 6.0,
                "progress": WorkProgress(
                    work="fetching", done_bytes=4_000_000, of_bytes=16_000_000, took_s=2.0, left_s=6.0
                ),
            },
            "now       round 7 of 54: catching up – fetching the base, 4 MB of 16 MB (25%), 2.0 s so far, "
            "about 6.0 s left",
        ),
        (
            {"activity": "syncing", "reason": "the worker is starting: opening the text", "eta_s": None}
            | {"progress": WorkProgress(work="opening the text", took_s=7.0, left_s=None)},
            "now       round 7 of 54: syncing – the worker is starting: opening the text, 7.0 s so far, "
            "time left unknown",
        ),
    ],
)
def test_a_status_reads_as_it_is(daemon, changed, line):
    assert line in facts(replace(daemon.operator.state, **changed))


@pytest.mark.parametrize(("first", "said"), [(0, ""), (961, "; records from round 961 on")])
def test_a_status_says_from_which_round_on_there_are_records(daemon, first, said):
    use = LedgerUse(accepted=3, worked=0, new=1, places=64, pruned=0, disk_bytes=4_000_000, records_from=first)
    line = f"ledger    3 authors, 0 more that worked, 1 new of 64 places; 4 MB{said}"
    assert line in facts(replace(daemon.operator.state, ledger=use))
    alone = msgspec.structs.replace(use, accepted=1)
    assert line.replace("3 authors", "1 author") in facts(replace(daemon.operator.state, ledger=alone))


def test_a_peer_that_has_trained_nothing_yet_has_dashes():
    row = PeerStatus(
        peer="12D3KooWpeer-abcdefgh", path="", maddr="", rtt_s=None, member=True, activity="syncing",
        round=0, final=-1, tokens_per_s=0.0, heard_s=1.0, faults=0,
    )  # fmt: skip
    cells = dict(zip(PEER_HEAD, peer_cells(row), strict=True))
    assert (cells["final"], cells["tokens/s"], cells["round"]) == ("–", "–", "0")


def test_status_says_where_the_time_goes(atoll, daemon):
    line = "93.1 % of the last 10 m 00 s: wait 4.0, fold 1.9, encode 0.6, checkpoint 0.4"
    assert f"goodput   {line}\n" in atoll("status").out
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render(daemon.operator.state))
    assert line in console.export_text()
    assert "goodput 93.1 %" in one_line(daemon.operator.state)
    total = json.loads(atoll("status", "--json").out)["goodput"]["total"]
    assert sum(total.values()) == 1000.0


def test_what_is_not_settled_stands_on_every_screen(daemon):
    line = "round 6 waits for the vote of …abcdef"
    now, console = replace(daemon.operator.state, unsettled=line), Console(width=120, file=io.StringIO())
    console.print(render(now))
    assert line in console.file.getvalue()
    assert f" | {line}" in one_line(now)
    assert " |  |" not in one_line(daemon.operator.state)


@pytest.mark.parametrize(("final", "said"), [(-1, "none final"), (0, "final 0")])
def test_no_number_stands_for_a_final_round_that_is_none(daemon, final, said):
    assert f" | {said} | " in one_line(replace(daemon.operator.state, final=final))


@pytest.mark.parametrize(
    ("room", "said"),
    [
        (Room(experts=6, of=16, free_bytes=11_200_000_000, place="cuda:0"), "(from 11.2 GB free on cuda:0)"),
        (Room(experts=6, of=16, free_bytes=3_200_000_000, place="memory"), "(from 3.2 GB of free memory)"),
        (Room(experts=6, of=16), "(`experts` in config.toml)"),
    ],
)
def test_status_says_how_many_experts_there_is_room_for(daemon, room, said):
    assert not [line for line in facts(daemon.operator.state) if "room" in line]
    now = msgspec.structs.replace(daemon.operator.state, experts=(3, 5), room=room)
    assert "experts   3, 5" in facts(now)
    assert f"          room for 6 of 16 experts {said}" in facts(now)


@pytest.mark.parametrize("window_s", [None, 0.0])
def test_a_node_that_does_not_know_where_its_time_goes_says_so(daemon, window_s):
    nothing = TimeShares(**dict.fromkeys(TimeShares.__struct_fields__, 0.0))
    found = None if window_s is None else Goodput(window_s=window_s, window=nothing, total=nothing)
    now = msgspec.structs.replace(daemon.operator.state, goodput=found)
    assert "goodput   –" in facts(now)
    assert "goodput –" in one_line(now)


def test_status_and_rounds_show_how_far_the_node_ran_ahead_of_a_fold(atoll, daemon):
    line = "overlap   up to 4 steps before a fold is in; 2 in the newest round, then held 100 ms\n"
    assert line in atoll("status").out
    assert "2 of 4" in atoll("rounds").out
    now = msgspec.structs.replace(daemon.operator.state, overlapped=None, held_s=None)
    assert "overlap   up to 4 steps before a fold is in" in facts(now)
    alone = msgspec.structs.replace(now, overlap_allowed=0)
    assert not [fact for fact in facts(alone) if fact.startswith("overlap")]


def test_status_json_is_the_status(atoll, daemon):
    shown = json.loads(atoll("status", "--json").out)
    assert msgspec.convert(shown, Status) == daemon.operator.state
    assert set(shown) == {"type", *Status.__struct_fields__}


def test_health_check_fails_when_the_node_needs_help(atoll, daemon):
    assert atoll("status", "--exit-code").code == 0
    daemon.operator.state = msgspec.structs.replace(
        daemon.operator.state, trouble="the disk is full; free some space"
    )
    ran = atoll("status", "--exit-code")
    assert ran.code == 4
    assert "the disk is full; free some space" in ran.out


def test_peers(atoll, daemon):
    assert "CdFk6TW  seal  punched" in atoll("peers").out
    rows = json.loads(atoll("peers", "--json").out)["peers"]
    assert [row["path"] for row in rows] == ["punched"]
    assert set(rows[0]) == set(PeerStatus.__struct_fields__)


def test_rounds(atoll, daemon):
    table = atoll("rounds").out.splitlines()
    assert [line.split()[0] for line in table] == ["round", "6", "7"]
    assert [line.split()[-2:] for line in table[1:]] == [["12.5", "%"]] * 2
    assert "1.7 s" in table[1], "idle in all"
    rows = json.loads(atoll("rounds", "--json", "--last", "1").out)["rounds"]
    assert [row["round"] for row in rows] == [7]
    assert set(rows[0]) == set(RoundStatus.__struct_fields__)


@pytest.mark.parametrize(
    ("args", "order"),
    [
        (["pause"], "pause by the operator"),
        (["pause", "--reason", "games"], "pause games"),
        (["pause", "30m", "--reason", "games"], "pause games for 1800"),
        (["pause", "2d"], "pause by the operator for 172800"),
        (["resume"], "resume"),
        (["limit", "--up", "20mbit"], "limit up=20mbit down=None"),
        (["limit", "--up", "none", "--down", "off"], "limit up= down=off"),
        (["limit", "--reset"], "limit up=None down=None"),
        (["run", "exclude", "abcdef"], "exclude abcdef from=None reason="),
        (["run", "exclude", "abcdef", "--excise"], "exclude abcdef from=None reason= since=0"),
        (["run", "exclude", "abcdef", "--excise", "--since", "5"], "exclude abcdef from=None reason= since=5"),
        (
            ["run", "exclude", "abcdef", "--from-round", "7", "--reason", "noise"],
            "exclude abcdef from=7 reason=noise",
        ),
        (["stop"], "stop finish=False"),
        (["stop", "--finish"], "stop finish=True"),
    ],
)
def test_orders_arrive(atoll, daemon, args, order):
    ran = atoll(*args)
    assert (ran.code, ran.out) == (0, f"taken: {order}\n")
    assert daemon.operator.orders == [order]
    assert json.loads(atoll(*args, "--json").out) == {"type": "done", "message": f"taken: {order}"}


def test_what_is_no_length_of_time_or_no_limit_is_a_usage_error(atoll, daemon):
    ran = atoll("pause", "soon")
    assert ran.code == 2
    assert "is not a time like 12h, 7d or 4w" in ran.err
    for args in ([], ["--reset", "--up", "20mbit"]):
        ran = atoll("limit", *args)
        assert (ran.code, "--reset" in ran.err) == (2, True)
    assert daemon.operator.orders == []


def test_eval(atoll, daemon):
    assert atoll("eval").out == "3.2500 bits per byte (2.2500 nats per token) after round 7\n"
    assert json.loads(atoll("eval", "--json").out) == {
        "type": "eval",
        "round": 7,
        "val_bpb": 3.25,
        "val_loss": 2.25,
    }


def test_a_refusal_is_one_line(atoll, daemon, fault):
    daemon.operator.fault = fault
    ran = atoll("eval")
    assert (ran.code, ran.out, ran.err) == (1, "", "error: the worker is starting; try again in a moment\n")
    daemon.operator.fault = ConfigError("no")
    assert atoll("resume").code == 78


def test_a_bug_in_the_daemon_is_a_refusal(atoll, daemon):
    daemon.operator.rows = None
    ran = atoll("rounds")
    assert ran.code == 1
    assert ran.err.startswith("error: internal error: TypeError")
    assert atoll("status").code == 0


@pytest.mark.parametrize(
    "command", ["status", "peers", "rounds", "logs", "pause", "resume", "limit --reset", "eval"]
)
def test_no_node_is_exit_3(atoll, command):
    ran = atoll(*command.split())
    assert (ran.code, ran.out) == (3, "")
    assert ran.err.startswith("error: no node runs in ")
    assert ran.err.endswith("or make one with `atoll run new NAME`\n")
    assert ran.err.count("\n") == 1


def test_stop_is_idempotent(atoll):
    ran = atoll("stop")
    assert (ran.code, ran.out) == (0, "no node runs here\n")


def test_a_dead_nodes_socket_is_no_node(atoll, daemon, tmp_path):
    other = tmp_path / "dead"
    other.mkdir()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(other / "control.sock"))
    assert atoll("status", "--home", str(other)).code == 3


def write_log(home, *messages: str) -> None:
    with home.log.open("a", encoding="utf-8") as file:
        for message in messages:
            line = {
                "time": "2026-01-02T03:04:05.678+00:00",
                "level": "info",
                "logger": "atoll.node.x",
                "message": message,
            }
            file.write(json.dumps(line) + "\n")


def test_logs(atoll, daemon):
    write_log(daemon.home, *(f"line {number}" for number in range(1200)))
    assert (
        atoll("logs", "-n", "2").out
        == "03:04:05.678 info    node.x: line 1198\n03:04:05.678 info    node.x: line 1199\n"
    )
    shown = [json.loads(line)["message"] for line in atoll("logs", "--json", "-n", "1200").out.splitlines()]
    assert shown == [f"line {number}" for number in range(1200)]


def test_logs_of_a_stopped_node(atoll, tmp_path):
    home = Home(tmp_path / "home")
    home.make()
    write_log(home, "last words")
    assert "last words" in atoll("logs").out
    assert atoll("logs", "-f").code == 3


def test_follow_goes_on_with_new_lines(daemon):
    write_log(daemon.home, "old")
    answers = stream(daemon.home, GetLogs(tail=10, follow=True), LogLines)
    assert [line.message for line in next(answers).lines] == ["old"]
    write_log(daemon.home, "new")
    assert [line.message for line in next(answers).lines] == ["new"]
    answers.close()


def test_watch_streams_until_the_daemon_ends(idle_daemon):
    with idle_daemon.running():
        answers = stream(idle_daemon.home, Watch(0.05), Status)
        assert [next(answers).round for _ in range(3)] == [7, 7, 7]
    assert len(list(answers)) < 100
    assert not idle_daemon.home.control_socket.exists()


def test_ask_gives_what_json_shows(daemon):
    assert ask(daemon.home.root, "status")["round"] == 7
    assert [row["round"] for row in ask(daemon.home.root, "rounds")["rounds"]] == [6, 7]
    with pytest.raises(NotRunning):
        ask(daemon.home.root / "nowhere", "status")


def test_many_operators_at_once(daemon):
    seen: list[int] = []
    threads = [
        threading.Thread(target=lambda: seen.append(call(daemon.home, GetStatus(), Status).round))
        for _ in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [7] * 12


def test_panel_draws_every_status(daemon):
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(
        render(msgspec.structs.replace(daemon.operator.state, trouble="look here", eta_s=None, val_bpb=None))
    )
    text = console.export_text()
    assert "round 7 of 54" in text
    assert "look here" in text
    assert "waiting for 1 of 4" in text


def test_addresses_are_shown_when_they_change(daemon):
    now = daemon.operator.state
    assert new_addresses(now, None) == [f"others join with --peer /ip4/127.0.0.1/tcp/4710/p2p/{now.peer}"]
    assert new_addresses(now, now) == []
    assert len(new_addresses(msgspec.structs.replace(now, addresses=("/ip4/1.2.3.4/tcp/1",)), now)) == 1


def test_one_plain_line_in_ten_seconds_and_trouble_at_once(daemon):
    now = daemon.operator.state
    assert is_news(now, None, 0)
    assert not is_news(msgspec.structs.replace(now, step=3, uptime_s=70), now, 1)
    assert not is_news(msgspec.structs.replace(now, round=8), now, 9)
    assert is_news(msgspec.structs.replace(now, trouble="the disk is full"), now, 1)
    assert is_news(now, now, 10)


def test_who_is_excluded_is_shown(atoll, daemon):
    gone = Exclusion(peer="12D3KooWgone", round=9, reason="noise")
    daemon.operator.state = replace(daemon.operator.state, excluded=(gone,))
    assert "excluded  12D3KooWgone from round 9 on: noise" in atoll("status").out
    assert json.loads(atoll("status", "--json").out)["excluded"][0]["round"] == 9
    assert "its work" not in atoll("status").out
    wanted = replace(gone, excise_since=4)
    daemon.operator.state = replace(daemon.operator.state, excluded=(wanted,))
    assert "its work since round 4 is to be taken out" in atoll("status").out
    daemon.operator.state = replace(daemon.operator.state, excluded=(replace(wanted, excised_in=11),))
    assert "its work since round 4 was taken out in round 11" in atoll("status").out
    votes = VotesAgainst(peer="12D3KooWbad", votes=2, needed=5, by_us=True)
    voted = replace(gone, by="voters")
    daemon.operator.state = replace(daemon.operator.state, excluded=(voted,), votes_against=(votes,))
    said = atoll("status").out
    assert "from round 9 on by two thirds of the voters: noise" in said
    assert "votes     2 of 5 to exclude 12D3KooWbad, this node among them" in said
    daemon.operator.peer_row = replace(daemon.operator.peer_row, votes_against=2)
    assert ", 2 to exclude" in atoll("peers").out
    daemon.operator.peer_row = replace(daemon.operator.peer_row, excluded_from=9)
    assert "excluded from 9" in atoll("peers").out


def test_an_excluded_node_is_unhealthy(atoll, daemon):
    daemon.operator.state = replace(daemon.operator.state, trouble="the run's owner excluded this node")
    ran = atoll("status", "--exit-code")
    assert (ran.code, ran.out.splitlines()[0]) == (4, "trouble   the run's owner excluded this node")


def test_who_counts_less_than_in_full_is_shown_in_a_line_each(atoll, daemon):
    now = daemon.operator.state
    assert "counts" not in atoll("status").out
    assert "\nmember " not in atoll("status").out
    own = Standing(peer="me", votes_in=3, why="votes after 3 more final rounds with its work (probation)")
    idle = Standing(peer="12D3KooWabcdefghidle", weight_16=0, verdicts=9, why="no weight: 9 verdicts")
    daemon.operator.state = replace(now, standing=own, diminished=(idle,))
    shown = atoll("status").out
    assert "counts    votes after 3 more final rounds with its work (probation)\n" in shown
    assert "member    …efghidle: no weight: 9 verdicts\n" in shown
    assert json.loads(atoll("status", "--json").out)["diminished"][0]["weight_16"] == 0


@pytest.mark.parametrize(
    ("standing", "cell"),
    [
        (None, "–"),
        (Standing(peer="p"), "in full"),
        (Standing(peer="p", weight_16=0, why="no weight"), "weight 0/16"),
        (Standing(peer="p", weight_16=8, votes_in=2, why="both"), "votes in 2, weight 8/16"),
        (Standing(peer="p", distrusted_until=70, why="silent"), "no reducer up to 70"),
    ],
)
def test_the_table_of_peers_says_what_each_counts_for(atoll, daemon, standing, cell):
    daemon.operator.peer_row = replace(daemon.operator.peer_row, standing=standing)
    head, row = atoll("peers").out.splitlines()
    assert row[head.index("counts") :].startswith(f"{cell}  ")
