"""Metrics: every sample is what the status says, in a text that the reference parsers read."""

import os
import re

import msgspec
import psutil
import pytest
from prometheus_client import REGISTRY, parser
from prometheus_client.openmetrics import parser as open_parser

from atoll.node.daemon.web.http_messages import HttpReply
from atoll.node.daemon.web.measurements import Measurements
from atoll.node.daemon.web.metrics import COUNTERS, GAUGES, HISTOGRAMS, Metrics, reason_label
from atoll.protocols.local.control_messages import Goodput, RelayUse, Status, TimeShares
from atoll.protocols.local.durations import DurationCounts
from atoll.protocols.local.privacy_now import PrivacyNow
from atoll.protocols.local.standing import Standing
from tests.monitoring.programs import promtool
from tests.test_docs import ROOT, text_of

OPEN = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.1"
REASONS = {
    "steps", "wait", "transfer", "encode", "fold", "checkpoint", "evaluate", "audit", "recompute", "start",
    "down",
}  # fmt: skip
PROCESS = (
    "cpu_seconds_total", "resident_memory_bytes", "virtual_memory_bytes", "start_time_seconds", "open_fds",
    "max_fds",
)  # fmt: skip


class Scraped:
    """A node whose status the test sets."""

    def __init__(self, status: Status) -> None:
        self.now = status
        self.steps = DurationCounts((0.1, 2.0))
        self.loggers = {"csv": (7, 0), "wandb": (3, 4)}
        self.members_final, self.disk = 9, (10, 100)
        measured = Measurements(
            model=lambda: "50m",
            durations={"step": self.steps},
            members_final=lambda: self.members_final,
            disk=lambda: self.disk,
            loggers=lambda: self.loggers,
        )
        self.metrics = Metrics(lambda: self.now, measured)

    def text(self, accept: str = "") -> HttpReply:
        return self.metrics.reply(accept)

    def samples(self, name: str) -> dict[tuple[str, ...], float]:
        """By label values, in the order of the labels' names."""
        families = parser.text_string_to_metric_families(self.text().body.decode())
        return {
            tuple(value for _, value in sorted(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
            if sample.name == name
        }

    def book(self, **total: float) -> None:
        goodput = Goodput(window_s=0.0, window=shares(), total=shares(**total))
        self.now = msgspec.structs.replace(self.now, goodput=goodput)


def shares(**seconds: float) -> TimeShares:
    return TimeShares(**{**dict.fromkeys(TimeShares.__struct_fields__, 0.0), **seconds})


@pytest.fixture
def node(status) -> Scraped:
    return Scraped(status)


def test_the_pages_have_every_metric_and_no_other(node):
    """Those of the tables by their names in the code, and all others by a scrape of a node that has everything."""
    pages = "".join(text_of(ROOT / "docs" / page) for page in ("web.md", "monitoring.md"))
    documented = {name for name in re.findall(r"`(atoll_[a-z_]+)", pages) if "_worker_process" not in name}
    families = open_parser.text_string_to_metric_families(node.text(OPEN).body.decode())
    ends = {"counter": "_total", "info": "_info"}
    scraped = {family.name + ends.get(family.type, "") for family in families}
    known = {name for name in scraped if name.startswith("atoll_") and "_worker_process" not in name}
    known |= {name for name, _, _ in GAUGES} | {f"{name}_total" for name, _, _ in COUNTERS}
    known |= {f"atoll_{name}_seconds" for name, _ in HISTOGRAMS}
    assert (known - documented, documented - known) == (set(), set())


def test_both_formats_parse_and_say_the_same(node):
    plain, new = node.text(), node.text(OPEN)
    assert plain.content_type.startswith("text/plain; version=0.0.4")
    assert new.content_type.startswith("application/openmetrics-text; version=1.0.0")
    old = list(parser.text_string_to_metric_families(plain.body.decode()))
    strict = list(open_parser.text_string_to_metric_families(new.body.decode()))
    said = [
        {(s.name, *sorted(s.labels.items())): s.value for f in found for s in f.samples} for found in (old, strict)
    ]
    assert said[0].keys() == said[1].keys()
    # The process goes on between the two answers, so what is measured of it may differ.
    assert all(value == said[1][name] for name, value in said[0].items() if not name[0].startswith("process_"))
    assert len(strict) > 25


def test_names_follow_the_conventions(node):
    for family in open_parser.text_string_to_metric_families(node.text(OPEN).body.decode()):
        assert family.name.startswith(("atoll_", "process_"))
        assert family.documentation
        assert not family.name.endswith(("_s", "_ms", "_kb"))
        assert family.type == "histogram" or len(family.samples) <= len(REASONS)
        assert all(sample.name.endswith("_total") == (family.type == "counter") for sample in family.samples)


def test_every_reason_for_the_time_is_there(node):
    spent = node.samples("atoll_time_seconds_total")
    assert {reason for (reason,) in spent} == REASONS
    assert spent["steps",] == 180.0
    assert sum(spent.values()) == 200.0
    assert node.samples("atoll_goodput_ratio") == {(): 0.95}


@pytest.mark.parametrize("reason", sorted(REASONS))
def test_each_reason_has_its_own_seconds(node, reason):
    node.book(**{f"{reason}_s": 12.5})
    assert node.samples("atoll_time_seconds_total") == {(name,): 12.5 * (name == reason) for name in REASONS}


def test_a_counter_stands_still_where_the_books_take_back(node):
    node.book(steps_s=100.0)
    assert node.samples("atoll_time_seconds_total")["steps",] == 100.0
    node.book(steps_s=94.0, recompute_s=6.0)
    spent = node.samples("atoll_time_seconds_total")
    assert (spent["steps",], spent["recompute",]) == (100.0, 6.0)
    node.book(steps_s=120.0, recompute_s=6.0)
    spent = node.samples("atoll_time_seconds_total")
    assert (spent["steps",], spent["recompute",]) == (120.0, 6.0)


def test_state_has_a_reason_of_few_words(node):
    assert node.samples("atoll_state") == {("waiting for N of N", "collecting"): 1.0}


@pytest.mark.parametrize(
    ("reason", "short"),
    [
        ("", ""),
        ("waiting for 3 of 12: …abcdef (training, round 5); goes on in 9 s at the latest", "waiting for N of N"),
        ("round 5: waiting for 1 of 4: …abcdef", "waiting for N of N"),
        ("round 5: folding contributions", "folding contributions"),
        ("waiting for finality: 64 rounds are open; two thirds …", "waiting for finality"),
        ("paused: games", "paused"),
        ("waiting for a peer: /ip4/192.0.2.1/tcp/1/p2p/12D3Koo refused", "waiting for a peer"),
        ("fetching moments from …QmXyzA", "fetching moments from N"),
    ],
)  # fmt: skip
def test_causes(reason, short):
    assert reason_label(reason) == short


def test_bytes_by_direction_and_kind_add_up(node):
    assert node.samples("atoll_network_bytes_total") == {
        ("up", "file"): 1_400_000.0,
        ("up", "other"): 100_000.0,
        ("down", "file"): 800.0,
        ("down", "other"): 100.0,
    }


def test_peers_by_path_have_zeros_and_unknown_numbers_have_no_sample(node):
    assert node.samples("atoll_peers") == {("direct",): 2.0, ("punched",): 0.0, ("relayed",): 1.0}
    assert node.samples("atoll_train_loss_nats") == {(): 2.5}
    assert node.samples("atoll_validation_loss_bpb") == {}
    assert node.samples("atoll_worker_restarts_total") == {(): 1.0}
    assert node.samples("atoll_tokens_total") == {(): 65536.0}
    assert node.samples("atoll_trouble") == {(): 0.0}


def test_what_this_node_counts_for(node):
    assert node.samples("atoll_weight_ratio") == {}
    own = Standing(peer="me", votes_in=3, weight_16=8, verdicts=4)
    node.now = msgspec.structs.replace(node.now, standing=own, diminished=(own, own))
    assert node.samples("atoll_weight_ratio") == {(): 0.5}
    assert node.samples("atoll_probation_rounds") == {(): 3.0}
    assert node.samples("atoll_members_diminished") == {(): 2.0}
    node.now = msgspec.structs.replace(node.now, standing=Standing(peer="me"))
    assert node.samples("atoll_weight_ratio") == {}, "a run without audits has none"


def test_what_is_spent_of_privacy(node):
    assert node.samples("atoll_privacy_epsilon") == node.samples("atoll_privacy_spent") == {}
    spent = PrivacyNow(epsilon=4.4, delta=1e-5, uses=1, most=8.0)
    node.now = msgspec.structs.replace(node.now, privacy=spent)
    assert node.samples("atoll_privacy_epsilon") == {(): 4.4}
    assert node.samples("atoll_privacy_epsilon_limit") == {(): 8.0}
    assert node.samples("atoll_privacy_spent") == {(): 0.0}
    node.now = msgspec.structs.replace(node.now, privacy=msgspec.structs.replace(spent, most=None, spent=True))
    assert node.samples("atoll_privacy_epsilon_limit") == {}
    assert node.samples("atoll_privacy_spent") == {(): 1.0}


def test_a_node_that_has_only_begun(node):
    node.now = msgspec.structs.replace(node.now, goodput=None, train_loss=None, tokens_per_s=None)
    assert node.samples("atoll_time_seconds_total") == {}
    assert node.samples("atoll_goodput_ratio") == {}


def test_words_of_the_user_cannot_break_the_text(node):
    node.now = msgspec.structs.replace(node.now, reason='the"re is\n\\nothing', activity="paused")
    assert node.samples("atoll_state") == {('the"re is\n\\nothing', "paused"): 1.0}


@pytest.mark.parametrize("accept", ["", OPEN])
def test_a_histogram_counts_in_all_buckets_from_the_first_that_holds_it(node, accept):
    for duration_s in (0.05, 0.1, 0.5, 7.0):
        node.steps.add(duration_s)
    text = node.text(accept).body.decode()
    for line in (
        '_bucket{le="0.1"} 2.0', '_bucket{le="2.0"} 3.0', '_bucket{le="+Inf"} 4.0', "_count 4.0", "_sum 7.65",
    ):  # fmt: skip
        assert f"atoll_step_seconds{line}\n" in text
    assert "atoll_round_seconds" not in text, "not measured here"
    parse = open_parser if accept else parser
    kinds = {family.name: family.type for family in parse.text_string_to_metric_families(text)}
    assert kinds["atoll_step_seconds"] == "histogram"


def test_the_run_is_named_once(node):
    text = node.text().body.decode()
    info = 'atoll_run_info{model="50m",name="tiny",run="' + "ab" * 32 + '",version="0.1.0"} 1.0'
    assert info in text
    assert text.count("ab" * 32) == 1


def test_figures_of_both_processes_under_their_own_names(node):
    node.now = msgspec.structs.replace(node.now, worker_pid=os.getppid())
    own, worker = (
        {name: node.samples(f"{prefix}process_{name}") for name in PROCESS} for prefix in ("", "atoll_worker_")
    )
    for found in (own, worker):
        assert all(len(samples) == 1 for samples in found.values()), found
        assert found["max_fds"][()] >= found["open_fds"][()] > 0
    assert own["start_time_seconds"][()] >= worker["start_time_seconds"][()]
    assert own["resident_memory_bytes"][()] == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    node.now = msgspec.structs.replace(node.now, worker_pid=0)
    assert node.samples("atoll_worker_process_open_fds") == {}, "there is none"
    assert node.samples("process_open_fds") != {}


def test_how_far_others_are_the_disk_and_the_loggers(node):
    assert node.samples("atoll_members_final_round") == {(): 9.0}
    assert node.samples("atoll_disk_free_bytes") == {(): 10.0}
    assert node.samples("atoll_disk_size_bytes") == {(): 100.0}
    assert node.samples("atoll_logger_events_total") == {("csv",): 7.0, ("wandb",): 3.0}
    assert node.samples("atoll_logger_dropped_total") == {("csv",): 0.0, ("wandb",): 4.0}
    node.members_final = node.disk = None
    assert node.samples("atoll_members_final_round") == node.samples("atoll_disk_free_bytes") == {}


def test_nodes_of_one_process_share_nothing(node, status):
    """Not even the library's registry, in which names may stand once only."""
    registered = set(REGISTRY._names_to_collectors)
    other = Scraped(status)
    node.steps.add(1.0)
    other.text()
    assert other.samples("atoll_step_seconds_count") == {(): 0.0}
    assert set(REGISTRY._names_to_collectors) == registered


@pytest.mark.filterwarnings("default")
def test_promtool_has_no_complaint(node):
    """With a value for every metric: what a node does not know has no sample, and would not be looked at."""
    standing = Standing(peer="me", votes_in=3, weight_16=8, verdicts=4, audits_made=2, audits_adopted=1)
    relay = RelayUse(circuits=1, circuits_served=2, bytes_relayed=3, bytes_today=4, bytes_per_day=5, refused=6)
    node.now = msgspec.structs.replace(
        node.now, val_bpb=1.5, standing=standing, relay=relay, clock_ahead_s=0.5, worker_pid=os.getppid(),
        privacy=PrivacyNow(epsilon=4.4, delta=1e-5, uses=1, most=8.0),
    )  # fmt: skip
    node.steps.add(0.5)
    families = {family.name for family in node.metrics.collect() if family.samples}
    assert {name.removesuffix("_total") for name, *_ in (*GAUGES, *COUNTERS)} <= families
    assert promtool("check", "metrics", given=node.text().body) == (0, "")


@pytest.mark.filterwarnings("default")
def test_promtool_would_complain(node):
    code, said = promtool("check", "metrics", given=b"# TYPE atoll_loss_bits gauge\natoll_loss_bits 1\n")
    assert code != 0
    assert "bytes" in said
    assert "help" in said
