"""Renders the node's status as metrics, in the text format of Prometheus or of OpenMetrics.

Names begin with `atoll_` and end in their unit; counters end in `_total`. Labels have few values: no peers and no
rounds, and the run in `atoll_run_info` only. A value that is not known has no sample.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

import msgspec
from prometheus_client import ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.utils import floatToGoString

from atoll.node.daemon.web.http_messages import HttpReply
from atoll.node.daemon.web.measurements import SHARES, Measurements
from atoll.protocols.local.control_messages import Status
from atoll.protocols.local.durations import DurationCounts
from atoll.protocols.local.standing import Standing

PATHS = ("direct", "punched", "relayed")
REASON_CHARACTERS = 60
PLAIN = choose_encoder("text/plain; version=0.0.4")
OPEN = choose_encoder("application/openmetrics-text; version=1.0.0")

_DETAIL = re.compile(r"[:;,(].*", re.DOTALL)
_OF_ROUND = re.compile(r"^round \d+: ")
_VARIES = re.compile(r"\S*\d\S*|…\S+")

Values = Iterable[tuple[tuple[str, ...], float | None]]
"""Pairs of label values and the sample, None where it is not known."""
StatusValue = Callable[[Status], float | None]

GAUGES: tuple[tuple[str, str, StatusValue], ...] = (
    ("atoll_uptime_seconds", "Since the start of the daemon.", lambda s: s.uptime_s),
    ("atoll_round", "The round at hand.", lambda s: s.round),
    ("atoll_run_rounds", "Rounds of the whole run.", lambda s: s.rounds),
    ("atoll_final_round", "Newest final round; -1 before the first.", lambda s: s.final),
    ("atoll_step", "Inner step of the round at hand.", lambda s: s.step),
    ("atoll_round_steps", "Inner steps of the round at hand.", lambda s: s.steps),
    ("atoll_round_contributors", "Authors of the newest final round's set.", lambda s: len(s.contributors)),
    ("atoll_members", "Live leases, our own included.", lambda s: s.members),
    ("atoll_connections", "Live connections.", lambda s: s.peers),
    ("atoll_train_loss_nats", "Per token, of our own steps.", lambda s: s.train_loss),
    ("atoll_validation_loss_bpb", "Bits per byte of text, of the model.", lambda s: s.val_bpb),
    ("atoll_tokens_per_second", "Speed of the inner steps.", lambda s: s.tokens_per_s),
    ("atoll_payload_bytes", "Of our newest contribution.", lambda s: s.payload_bytes),
    ("atoll_clock_ahead_seconds", "The clock in the middle of all, against ours.", lambda s: s.clock_ahead_s),
    ("atoll_trouble", "1 while a fault waits for the operator.", lambda s: float(bool(s.trouble))),
    ("atoll_weight_ratio", "Of the weight of our next work, by audits.", lambda s: weight_ratio(s.standing)),
    ("atoll_probation_rounds", "Until this node votes.", lambda s: s.standing.votes_in if s.standing else None),
    ("atoll_members_diminished", "Other live members that count less than in full.", lambda s: len(s.diminished)),
    ("atoll_privacy_epsilon", "Of our data so far.", lambda s: s.privacy.epsilon if s.privacy else None),
    ("atoll_privacy_epsilon_limit", "Of the run.", lambda s: s.privacy.most if s.privacy else None),
    ("atoll_privacy_spent", "1 while ε is used up.", lambda s: float(s.privacy.spent) if s.privacy else None),
    ("atoll_relay_circuits", "Relayed for others now.", lambda s: s.relay.circuits if s.relay else None),
)
COUNTERS: tuple[tuple[str, str, StatusValue], ...] = (
    ("atoll_tokens", "That this node trained on.", lambda s: s.tokens),
    ("atoll_validated_rounds", "That this node validated.", lambda s: s.validated),
    ("atoll_audits_made", "Measured here.", lambda s: s.standing.audits_made if s.standing else None),
    ("atoll_audits_adopted", "Of evaluators.", lambda s: s.standing.audits_adopted if s.standing else None),
    ("atoll_worker_restarts", "Workers that died and came back.", lambda s: s.worker_restarts),
    ("atoll_network_restarts", "Network processes that died and came back.", lambda s: s.host_restarts),
    ("atoll_relay_bytes", "Relayed for others.", lambda s: s.relay.bytes_relayed if s.relay else None),
)
HISTOGRAMS: tuple[tuple[str, str], ...] = (
    ("step", "Inner steps, each on its own."),
    ("round", "Rounds, from the start of one's training to that of the next one's, pauses included."),
    ("round_trip", "Requests to peers, up to the answer; those without an answer are not counted."),
)
"""Names of histograms, without `atoll_` and their unit, and what they count."""


class Metrics:
    """Renders one scrape from the current status. Its only state is the highest value of each counter so far.

    Nothing is registered in the library's registry, which all nodes of a process would share.
    """

    def __init__(self, status: Callable[[], Status], measured: Measurements | None = None) -> None:
        """`status` gives the node's current status; it is called at each scrape."""
        self._status = status
        self._measured = measured or Measurements()
        self._highest: dict[tuple[str, ...], float] = {}
        self._worker_pid = 0
        self._processes = (
            ProcessCollector(registry=None),
            ProcessCollector("atoll_worker", pid=lambda: self._worker_pid, registry=None),
        )

    def reply(self, accept: str) -> HttpReply:
        """The metrics as OpenMetrics if the Accept field names it, else as Prometheus text."""
        encode, content_type = OPEN if "application/openmetrics-text" in accept else PLAIN
        return HttpReply(encode(self), content_type)

    def collect(self) -> Iterator[Metric]:
        """All metric families, from one status."""
        now = self._status()
        yield InfoMetricFamily("atoll_build", "This program.", {"version": now.version, "device": now.device})
        run = {"run": now.run, "name": now.run_name, "version": now.version, "model": self._measured.model()}
        yield InfoMetricFamily("atoll_run", "The run that this node takes part in.", run)
        state = (now.activity, reason_label(now.reason))
        yield _gauge("atoll_state", "1 for what it does now.", ("state", "reason"), [(state, 1)])
        yield _gauge("atoll_reachability", "1 for how others reach it.", ("state",), [((now.reachability,), 1)])
        paths = [((path,), now.paths.get(path, 0)) for path in PATHS]
        yield _gauge("atoll_peers", "Connections by path.", ("path",), paths)
        for name, about, value in GAUGES:
            yield _gauge(name, about, (), [((), value(now))])
        yield _gauge(
            "atoll_goodput_ratio", "Time in steps that count, of the last minutes.", (), [((), goodput_ratio(now))]
        )
        yield from self._counters(now)
        yield from self._measurements()
        self._worker_pid = now.worker_pid  # 0 while there is no worker: no such process, so no samples
        for process in self._processes:
            yield from process.collect()

    def _measurements(self) -> Iterator[Metric]:
        about = "Newest final round of the others: the median of their leases."
        yield _gauge("atoll_members_final_round", about, (), [((), self._measured.members_final())])
        free, size = self._measured.disk() or (None, None)
        yield _gauge("atoll_disk_free_bytes", "Of the home's file system.", (), [((), free)])
        yield _gauge("atoll_disk_size_bytes", "Of the home's file system.", (), [((), size)])
        for name, about in HISTOGRAMS:
            if name in self._measured.durations:
                yield _histogram(f"atoll_{name}_seconds", about, self._measured.durations[name])

    def _counters(self, now: Status) -> Iterator[Metric]:
        for name, about, value in COUNTERS:
            yield self._counter(name, about, (), [((), value(now))])
        yield self._counter("atoll_time_seconds", "Where the time went.", ("reason",), time_spent(now))
        yield self._counter("atoll_network_bytes", "Moved.", ("direction", "kind"), bytes_moved(now))
        loggers = self._measured.loggers()
        for name, about, place in (("events", "Written.", 0), ("dropped", "Events that were lost.", 1)):
            values = [((logger,), float(counts[place])) for logger, counts in loggers.items()]
            yield self._counter(f"atoll_logger_{name}", about, ("logger",), values)

    def _counter(self, name: str, about: str, labels: tuple[str, ...], values: Values) -> Metric:
        """A counter family whose values never fall: a scraper would take that for a restart and count all again.

        Seconds of steps can fall, since steps that turn out to be in vain move to `recompute`. Their counter then
        stands still until it is made up for, so that sums over longer times are right.
        """
        family = CounterMetricFamily(name, about, labels=labels)
        for label_values, value in values:
            if value is not None:
                key = (name, *label_values)
                self._highest[key] = max(value, self._highest.get(key, 0.0))
                family.add_metric(label_values, self._highest[key])
        return family


def goodput_ratio(now: Status) -> float | None:
    """Time in steps that count, as a share of the window; None before there is one."""
    if now.goodput is None or not now.goodput.window_s:
        return None
    return now.goodput.window.steps_s / now.goodput.window_s


def weight_ratio(standing: Standing | None) -> float | None:
    """Share of the claimed weight that counts; None in a run without audits."""
    return None if standing is None or standing.verdicts is None else standing.weight_16 / 16


def time_spent(now: Status) -> Values:
    """Seconds since the daemon's start, by what the time went into."""
    if now.goodput is None:
        return ()
    total = msgspec.structs.asdict(now.goodput.total)
    return [((name.removesuffix("_s"),), total[name]) for name in SHARES]


def bytes_moved(now: Status) -> Values:
    """Bytes by direction and kind: `file` for contents of blobs, `other` for everything else, framing included."""
    up, down = now.bytes_up - now.blob_bytes_up, now.bytes_down - now.blob_bytes_down
    return [
        (("up", "file"), now.blob_bytes_up),
        (("down", "file"), now.blob_bytes_down),
        (("up", "other"), max(0, up)),
        (("down", "other"), max(0, down)),
    ]


def reason_label(reason: str) -> str:
    """A reason without its varying parts (numbers, peers, detail), so that the label has few values.

    `round 7: waiting for 1 of 4: …abcdef (training)` is `waiting for N of N`.
    """
    plain = _DETAIL.sub("", _OF_ROUND.sub("", reason))
    return _VARIES.sub("N", plain).strip()[:REASON_CHARACTERS]


def _gauge(name: str, about: str, labels: tuple[str, ...], values: Values) -> Metric:
    family = GaugeMetricFamily(name, about, labels=labels)
    for label_values, value in values:
        if value is not None:
            family.add_metric(label_values, value)
    return family


def _histogram(name: str, about: str, seen: DurationCounts) -> Metric:
    names = [*map(floatToGoString, seen.bounds_s), "+Inf"]
    return HistogramMetricFamily(
        name, about, buckets=list(zip(names, accumulate(seen.counts), strict=True)), sum_value=seen.total_s
    )
