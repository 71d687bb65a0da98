"""What the status says of the network comes from the hosts that know it, through every layer of them."""

import dataclasses
from dataclasses import dataclass
from datetime import datetime
from types import SimpleNamespace

import msgspec
import pytest

from atoll.node.config.node_config import NodeConfig
from atoll.node.config.roles import Work
from atoll.node.daemon.host_factory import make_host, route_host
from atoll.node.daemon.rounds.machine import begin
from atoll.node.daemon.rounds.queries import pause_line
from atoll.node.daemon.rounds.state import Phase, config_of
from atoll.node.daemon.status import FETCHING, DaemonOperator, speed_of, until
from atoll.node.daemon.telemetry.round_log import sent_per_round
from atoll.node.runs.presets import preset
from atoll.p2p.blobs.download import DownloadProgress
from atoll.p2p.limits.config import read_limits
from atoll.p2p.limits.limited_host import LimitedHost
from atoll.protocols.identity import Identity
from atoll.protocols.ids import RunId
from atoll.protocols.ledger.registers import Lease
from atoll.protocols.local.control_messages import RoundStatus
from atoll.protocols.local.progress import WorkProgress
from atoll.protocols.local.standing import Standing
from atoll.protocols.local.worker_messages import NOTHING_YET
from atoll.protocols.run.sections.privacy import PrivacySpec

ROW = RoundStatus(
    round=0, peer="me", digest="aa", payload_bytes=19_722, bytes_up=41_500, blob_bytes_up=39_560,
    blob_payload_up=39_444,
)  # fmt: skip
PARTS = (
    "log", "chain", "host", "limited", "swarm", "net", "trainer", "goodput", "web", "access", "loggers",
    "guest", "stop_daemon",
)  # fmt: skip
OUTSIDE, LOOPBACK = "/ip4/0.0.0.0/tcp/4710", "/ip4/127.0.0.1/tcp/4710"


def chain_of(view: object) -> SimpleNamespace:
    """The node's chain, with a driver that has this view."""
    return SimpleNamespace(driver=SimpleNamespace(view=lambda: view))


@pytest.mark.parametrize(
    ("listen", "config", "ports"),
    [
        (OUTSIDE, NodeConfig(), {}),
        (LOOPBACK, NodeConfig(), None),
        (OUTSIDE, NodeConfig(port_map=False), None),
        (OUTSIDE, NodeConfig(transport="pylibp2p"), None),
    ],
)
def test_the_router_s_ports_and_what_is_sent_reach_the_status(tmp_path, listen, config, ports) -> None:
    identity = Identity(b"s" * 32)
    host = make_host((listen,), config, identity)
    limited = LimitedHost(host, read_limits(config.limits), tmp_path / "month")
    routed = route_host(limited, config, identity, RunId(bytes(32)), [], lambda peer, fault: None)
    absent = ("net", "chain", "trainer", "goodput", "web", "access", "loggers", "guest", "stop_daemon")
    others = dict.fromkeys(absent)
    plan = SimpleNamespace(run=SimpleNamespace(spec=preset("tiny", identity.peer_id, 1)))
    log = SimpleNamespace(rows=dict.fromkeys(range(3), ROW))
    swarm = SimpleNamespace(discovery_table=dict)
    operator = DaemonOperator(plan=plan, log=log, host=routed, limited=limited, swarm=swarm, **others)
    shown = operator._network()
    assert shown["port_map"] == ports
    assert shown["sent"] == sent_per_round([ROW], 4 * plan.run.spec.model.parameters)
    assert 50 < shown["sent"].below_fp32 < 60


def test_a_peer_has_the_name_of_its_lease() -> None:
    spec, others = preset("tiny", Identity(b"o" * 32).peer_id, 1), dict.fromkeys(PARTS)
    one = DaemonOperator(plan=SimpleNamespace(run=SimpleNamespace(spec=spec)), **others)
    view = SimpleNamespace(peer="them", path="direct", maddr="", rtt_s=None, faults=0)
    lease = Lease("training", 3, 2, b"", -1, 10.0, name="otter")
    assert one._peer_row(view, lease, 5.0).name == "otter"
    assert one._peer_row(view, None, 0.0).name == ""


async def test_a_peer_that_is_no_member_now_has_the_reason_for_an_activity() -> None:
    """A stopped, a lost and a proven author all have no lease, or none that counts; a stranger has no reason."""
    spec, others = preset("tiny", Identity(b"o" * 32).peer_id, 1), dict.fromkeys(PARTS)
    reasons = {
        "here": "gone",
        "idle": "gone",
        "stopped": "left",
        "lost": "gone",
        "liar": "two histories",
        "stranger": "",
    }
    lease = Lease("training", 3, 2, b"", -1, 10.0)
    leases = dict.fromkeys(("here", "idle", "stopped", "liar"), (lease, 5.0))
    known = [
        SimpleNamespace(peer=peer, path="", maddr="", rtt_s=None, faults=0, last_error="") for peer in reasons
    ]
    epochs = SimpleNamespace(left={"stopped": 3}, voted={}, back={})
    authors = {"here", "idle", "stopped", "lost", "liar"}
    state = SimpleNamespace(equivocators={"liar"}, epochs=epochs, accepted=authors, epoch=b"")
    standings = SimpleNamespace(
        of=lambda *peers: [Standing(peer=peer, weight_16=16 * (peer == "here")) for peer in peers],
        finality=lambda: state,
    )
    view = SimpleNamespace(left={"stopped"}, excluded=(), votes_against=(), standings=standings)
    parts = {
        "chain": SimpleNamespace(driver=SimpleNamespace(view=lambda: view)),
        "net": SimpleNamespace(leases=lambda: leases),
        "swarm": SimpleNamespace(peers=lambda: known),
    }
    one = DaemonOperator(plan=SimpleNamespace(run=SimpleNamespace(spec=spec)), **{**others, **parts})
    shown = {row.peer: row.activity for row in await one.peers()}
    assert shown == reasons | {"here": "training", "idle": "training"}


@pytest.mark.parametrize(
    ("for_s", "end"), [(None, ""), (1800.0, ", until 23:30"), (2 * 86400.0, ", until 2026-11-28 23:00")]
)
def test_a_pause_says_its_end_in_the_user_s_time(for_s, end) -> None:
    assert until(for_s, datetime(2026, 11, 26, 23)) == end


def test_before_the_first_step_of_a_round_the_speed_is_that_of_the_newest_one() -> None:
    trained = msgspec.structs.replace(ROW, tokens=8192, train_s=4.0)
    assert speed_of(trained) == 2048.0
    for unknown in (None, ROW, msgspec.structs.replace(trained, train_s=0.0)):
        assert speed_of(unknown) is None


@dataclass
class Log:
    """The rows of a node that trained rounds 0 to 8, of which 5 are final."""

    rows: dict[int, RoundStatus]

    def newest_final(self) -> RoundStatus:
        return self.rows[5]

    def newest_trained(self) -> RoundStatus:
        return self.rows[8]


def operator(*, applied: int, ready: bool, phase: Phase, at: int) -> DaemonOperator:
    rows = {
        number: msgspec.structs.replace(ROW, round=number, digest=f"{number:02d}", final=number <= 5)
        for number in range(9)
    }
    view = SimpleNamespace(applied=applied, is_worker_ready=ready, round=SimpleNamespace(phase=phase, round=at))
    parts = (
        "plan",
        "host",
        "limited",
        "swarm",
        "net",
        "trainer",
        "goodput",
        "web",
        "access",
        "loggers",
        "guest",
        "stop_daemon",
    )
    others = dict.fromkeys(parts)
    return DaemonOperator(log=Log(rows), chain=chain_of(view), **others)


@pytest.mark.parametrize(
    ("applied", "ready", "final", "digest"),
    [
        (NOTHING_YET, False, 5, "05"),  # it loads after a start
        (-1, False, 5, "05"),
        (4, True, 4, "04"),  # what was saved is older than what was final: it folds round 5 again
        (5, True, 5, "05"),  # and not the digest of round 8, which closed here
        (-1, True, -1, ""),  # its state was removed
        (6, True, 6, ""),  # the row says that it is open: no digest is better than the view's
    ],
)
def test_the_agreed_digest_is_that_of_the_final_round(applied, ready, final, digest) -> None:
    found, row = operator(applied=applied, ready=ready, phase=Phase.TRAIN, at=9)._agreed()
    assert (found, row.digest if row else "") == (final, digest)


@pytest.mark.parametrize(
    ("phase", "at", "shown"), [(Phase.SYNC, 0, 9), (Phase.CATCH_UP, 12, 12), (Phase.TRAIN, 3, 3)]
)
def test_a_node_that_comes_up_knows_its_round(phase, at, shown) -> None:
    assert operator(applied=-1, ready=False, phase=phase, at=at)._round(5) == shown


@pytest.mark.parametrize(
    ("worker", "refused", "frozen", "missing", "guest", "shown"),
    [
        ("", "", "", "", "", ""),
        ("", "", "", "", "guest.battery limits nothing", "guest.battery limits nothing"),
        ("memory", "full", "frozen", "", "guest", "memory"),
        ("", "full", "", "round 6 lacks 1", "", "peers do not admit this node: full"),
        ("", "", "frozen: …; round 6 lacks 1", "round 6 lacks 1", "guest", "frozen: …; round 6 lacks 1"),
        ("", "", "", "round 6 lacks 1", "guest", "round 6 lacks 1"),
    ],
)
def test_what_needs_the_operator_is_trouble_a_named_fault_first(
    worker, refused, frozen, missing, guest, shown
) -> None:
    me, spec = Identity(b"s" * 32).peer_id, preset("tiny", Identity(b"o" * 32).peer_id, 1)
    node = SimpleNamespace(
        trouble="",
        frozen=frozen,
        missing=missing,
        standings=SimpleNamespace(trouble=lambda: ""),
        round=SimpleNamespace(shortage="", round=0),
    )
    parts = ("log", "host", "limited", "net", "goodput", "web", "access", "loggers", "stop_daemon")
    one = DaemonOperator(
        plan=SimpleNamespace(run=SimpleNamespace(spec=spec), identity=SimpleNamespace(peer_id=me)),
        chain=chain_of(node),
        # One liar refuses this node whatever the others do.
        swarm=SimpleNamespace(
            replication=SimpleNamespace(refusals={me: "words of a liar"}, refusal=refused, local_fault=None)
        ),
        trainer=SimpleNamespace(trouble=worker),
        guest=SimpleNamespace(trouble=guest),
        **dict.fromkeys(parts),
    )
    assert one._trouble() == shown


@pytest.mark.parametrize(("most", "is_spent"), [(msgspec.UNSET, False), (5.0, True)])
def test_what_is_spent_of_privacy_is_of_the_uses_that_the_worker_counted(most, is_spent) -> None:
    plain = preset("tiny", Identity(b"o" * 32).peer_id, 1)
    spec = msgspec.structs.replace(plain, privacy=PrivacySpec(clip=1.0, noise=1.0, most=most))
    plan = SimpleNamespace(run=SimpleNamespace(spec=spec), config=SimpleNamespace(work=Work()))
    one = DaemonOperator(plan=plan, **dict.fromkeys(PARTS))
    assert one._privacy(None, is_spent=is_spent) is None, "unknown is not 0"
    found = one._privacy(4, is_spent=is_spent)
    assert found.epsilon == pytest.approx(10.0, abs=0.01), "docs/privacy.md has this value"
    assert (found.uses, found.most, found.spent) == (4, most or None, is_spent)
    plan.config.work = Work(trains=False)
    assert one._privacy(4, is_spent=is_spent) is None


START = WorkProgress(work="opening the text", took_s=7.0, left_s=3.0)
DOWNLOAD = DownloadProgress(done_bytes=4, of_bytes=16, took_s=2.0, left_s=6.0)
BRIEF = DownloadProgress(done_bytes=16, of_bytes=16, took_s=0.1, left_s=0.0)
FETCH = WorkProgress(work=FETCHING, done_bytes=4, of_bytes=16, took_s=2.0, left_s=6.0)


@pytest.mark.parametrize(
    ("ready", "phase", "waiting", "download", "start", "shown"),
    [
        (False, Phase.SYNC, "", None, START, START),
        (False, Phase.SYNC, "", DOWNLOAD, START, FETCH),  # its files come first
        (False, Phase.SYNC, "", None, None, None),  # it died, and is started again in a moment
        (True, Phase.CATCH_UP, "", DOWNLOAD, None, FETCH),
        (True, Phase.CATCH_UP, "", None, None, None),
        (True, Phase.CATCH_UP, "", BRIEF, None, None),  # a payload, while the model is applied
        (True, Phase.TRAIN, "fetching shard 1 of 2", DOWNLOAD, None, FETCH),
        (True, Phase.TRAIN, "", DOWNLOAD, None, None),  # nothing waits for it
        (True, Phase.PAUSED, "", DOWNLOAD, None, None),
    ],
)
def test_what_keeps_a_node_from_training_is_shown_with_its_progress(
    ready, phase, waiting, download, start, shown
) -> None:
    one = operator(applied=-1, ready=ready, phase=phase, at=0)
    view = one.control.view()
    view.waiting = waiting
    one = dataclasses.replace(
        one,
        plan=SimpleNamespace(config=NodeConfig()),
        trainer=SimpleNamespace(starting=lambda: start),
        swarm=SimpleNamespace(blobs=SimpleNamespace(largest_download=lambda: download)),
    )
    assert one._progress() == shown


@pytest.mark.parametrize(
    ("syncing", "start", "stopping", "said"),
    [
        ("", START, False, "the worker is starting: opening the text"),
        ("", None, False, "the worker is starting"),
        ("fetching the base", START, False, "fetching the base"),
        ("", None, True, "the node stops"),  # its worker has ended, and none is started
        ("it died", None, True, "the node stops"),
    ],
)
def test_a_worker_that_starts_or_ends_says_so(syncing, start, stopping, said) -> None:
    one = operator(applied=-1, ready=False, phase=Phase.SYNC, at=0)
    one.control.view().round.syncing = syncing
    one = dataclasses.replace(
        one,
        plan=SimpleNamespace(config=NodeConfig()),
        trainer=SimpleNamespace(starting=lambda: start, is_stopping=stopping),
    )
    assert one._reason() == said


@pytest.mark.parametrize(
    ("resting", "held", "shown"),
    [
        ("by the user", "", 50.0),
        ("", "outside its hours", 7200.0),
        ("by the user", "outside its hours", None),  # both must end
    ],
)
def test_a_pause_that_ends_by_itself_says_when(resting, held, shown) -> None:
    spec = preset("tiny", Identity(b"o" * 32).peer_id, 1)
    paused = {"phase": Phase.PAUSED, "resting": resting, "held": held, "rest_until": 150.0, "now": 100.0}
    state = msgspec.structs.replace(begin(config_of(spec, spec.owner)), **paused)
    one = operator(applied=-1, ready=True, phase=Phase.PAUSED, at=0)
    one = dataclasses.replace(one, guest=SimpleNamespace(left_s=lambda: 7200.0))
    assert one._eta_s(None, state) == shown


@pytest.mark.parametrize(
    ("phase", "end", "said"),
    [
        (Phase.TRAIN, "", "the round at hand is finished, then the node pauses"),
        (Phase.COLLECT, ", until 23:30", "the round at hand is finished, then the node pauses, until 23:30"),
        (Phase.JOIN, ", until 23:30", "no round is at hand: the node pauses, until 23:30"),
        (Phase.PAUSED, "", "no round is at hand: the node pauses"),
        (Phase.DONE, "", "all rounds are trained: there is nothing to pause"),
        (Phase.FINISHED, ", until 23:30", "all rounds are trained: there is nothing to pause"),
    ],
)
def test_a_pause_says_what_it_means_to_a_node_in_this_phase(phase, end, said) -> None:
    assert pause_line(SimpleNamespace(phase=phase), end) == said


@pytest.mark.parametrize(
    ("resting", "held", "said"),
    [
        ("by the user", "", "going on at the round where the others are"),
        ("", "", "the node was not paused"),
        ("", "outside its hours", "the node was not paused; it rests: outside its hours"),
    ],
)
async def test_the_answer_to_an_order_is_about_the_state_before_it(resting, held, said) -> None:
    view = SimpleNamespace(round=SimpleNamespace(resting=resting, held=held, phase=Phase.JOIN), excluded=())
    orders = []

    def resume() -> None:
        orders.append("resume")
        view.round.resting = ""

    one = operator(applied=-1, ready=True, phase=Phase.TRAIN, at=0)
    driver = SimpleNamespace(view=lambda: view, resume=resume, pause=lambda *order: orders.append(order))
    plan = SimpleNamespace(identity=SimpleNamespace(peer_id="me"))
    one = dataclasses.replace(one, plan=plan, chain=SimpleNamespace(driver=driver))
    assert await one.resume() == said
    assert await one.pause("by the user", None) == "no round is at hand: the node pauses"
    assert orders == ["resume", ("by the user", None)]


@pytest.mark.parametrize(("still_s", "shown"), [(0.0, 4.0), (5.0, 4.0), (5.25, None)])
def test_an_estimate_that_a_still_node_outlasts_is_none(still_s, shown) -> None:
    """A full disk keeps the last step's work: `about 136 ms left` stood beside the trouble for minutes."""
    spec = preset("tiny", Identity(b"o" * 32).peer_id, 1)
    state = msgspec.structs.replace(begin(config_of(spec, spec.owner)), phase=Phase.TRAIN, step_s=2.0)
    one = operator(applied=-1, ready=True, phase=Phase.TRAIN, at=0)
    one.control.view().still_s = still_s
    progress = SimpleNamespace(step=6, steps=8)
    assert one._eta_s(progress, state) == shown


def test_the_end_of_a_pause_is_said_anew_each_time() -> None:
    """Its clock stands while a laptop sleeps: a line that was made once was hours off then."""
    spec = preset("tiny", Identity(b"o" * 32).peer_id, 1)
    paused = {"phase": Phase.PAUSED, "resting": "by the user", "now": 100.0}
    state = msgspec.structs.replace(begin(config_of(spec, spec.owner)), **paused)
    one = operator(applied=-1, ready=True, phase=Phase.PAUSED, at=0)
    view = one.control.view()
    view.waiting = view.progress = None
    for rest_until, said in ((None, ""), (100.0 + 3 * 86400.0, until(3 * 86400.0, datetime.now()))):
        view.round = msgspec.structs.replace(state, rest_until=rest_until)
        assert one._reason() == f"by the user{said}"
