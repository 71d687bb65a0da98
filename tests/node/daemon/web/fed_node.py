"""A node's status for readers of its web page, and a source of it that the test sets."""

from collections.abc import Sequence

import msgspec

from atoll.node.daemon.web.page_data import PageEvent, ResourceUse, RoundWork, SampleText
from atoll.protocols.errors import ConfigError
from atoll.protocols.local.control_messages import (
    Goodput,
    LogLine,
    PeerStatus,
    RoundStatus,
    Status,
    TimeShares,
)

PEER = "12D3KooWByRxyokKmxMNkMYp1SavrjyivNPwMg3K5hmXsCdFk6TW"


def shares(**seconds: float) -> TimeShares:
    return TimeShares(**{**dict.fromkeys(TimeShares.__struct_fields__, 0.0), **seconds})


def new_status() -> Status:
    return Status(
        version="0.1.0", pid=4711, uptime_s=61.5, peer=PEER, name="otter", addresses=("/ip4/192.0.2.7/tcp/4710",),
        run="ab" * 32, run_name="tiny", activity="collecting",
        reason="waiting for 1 of 4: …FkA6TW (training, round 7)", eta_s=2.5, round=7, rounds=54, step=0, steps=8,
        final=5, digest="cd" * 32, contributors=(PEER,),
        experts=None, members=4, peers=3, paths={"direct": 2, "relayed": 1}, train_loss=2.5,
        val_bpb=None, tokens_per_s=7164.6,
        payload_bytes=19722, bytes_up=1_500_000, bytes_down=900, train_s=0.28, wait_s=1.5, device="cpu",
        worker_pid=4712, worker_restarts=1, host_restarts=0, tokens=65536,
        blob_bytes_up=1_400_000, blob_bytes_down=800,
        observed=("/ip4/198.51.100.3/udp/999/quic-v1",), reachability="public",
        reachability_why="dialled back at /ip4/198.51.100.3/tcp/4710",
        goodput=Goodput(
            window_s=100.0, window=shares(steps_s=95.0, wait_s=5.0), total=shares(steps_s=180.0, wait_s=20.0)
        ),
    )  # fmt: skip


ROUND_ROW = RoundStatus(
    round=6, peer=PEER, digest="cd" * 32, set="ef" * 32, final=True, contributors=(PEER,), train_loss=2.5,
    val_bpb=None, steps=8, tokens=8192, payload_bytes=19722, bytes_up=59166, bytes_down=59166, blob_bytes_up=59200,
    blob_payload_up=59166, train_s=0.28, encode_s=0.05, wait_s=1.5, steps_s=0.25, transfer_s=0.2,
)  # fmt: skip
PEER_ROW = PeerStatus(
    peer=PEER, path="punched", maddr="/ip4/192.0.2.9/udp/4710/quic-v1", rtt_s=0.012, member=True,
    activity="training", round=7, final=5, tokens_per_s=7000.0, heard_s=0.5, faults=0,
)  # fmt: skip


LOG_LINE = LogLine("2026-11-24T03:49:53.123+00:00", "info", "atoll.node.daemon", "joined 192.0.2.9:4710")
LINK = "atoll:ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"


class Node:
    """A source of data that the test sets. Implements `StatusSource`."""

    def __init__(self) -> None:
        self.now, self.known = new_status(), [PEER_ROW]
        self.rows = [ROUND_ROW]
        self.is_local = True
        self.still = 0.0
        self.late: dict[int, tuple[str, ...]] = {}
        """Authors of contributions beside those of a round's set, by round."""
        self.lines = [LOG_LINE]
        self.events = [PageEvent(1.8e9, "trouble", "error=192.0.2.9:4710 is taken")]
        self.link = LINK
        self.text = SampleText(round=5, unix_s=1.8e9, text="To be,\nor not")

    def status(self) -> Status:
        return self.now

    async def peers(self) -> Sequence[PeerStatus]:
        return self.known

    def still_s(self) -> float:
        return self.still

    def rounds(self, last: int) -> Sequence[RoundStatus]:
        return self.rows[-last:]

    def rounds_before(self, number: int) -> Sequence[RoundStatus]:
        return [row for row in self.rows if row.round < number]

    def work(self, numbers: Sequence[int]) -> Sequence[RoundWork]:
        found = []
        for row in (row for row in self.rows if row.round in numbers):
            peers = (*row.contributors, *self.late.get(row.round, ()))
            claims = {"loss": (2.25,) * len(peers), "tokens": (8192,) * len(peers)}
            found.append(RoundWork(round=row.round, peers=peers, **claims))
        return found

    def resources(self, worker_pid: int) -> ResourceUse:
        return ResourceUse(
            daemon_cores=0.02, daemon_bytes=90_000_000, worker_cores=1.5, worker_bytes=700_000_000, cores=2,
            memory_free_bytes=3_000_000_000, memory_bytes=8_000_000_000, disk_free_bytes=None, disk_bytes=None,
        )  # fmt: skip

    def sample(self) -> SampleText:
        return self.text

    def log_news(self, after: int) -> tuple[int, Sequence[LogLine]]:
        return len(self.lines), self.lines[after:]

    def event_news(self, after: int) -> tuple[int, Sequence[PageEvent]]:
        return len(self.events), self.events[after:]

    def invite(self) -> str:
        if not self.link:
            raise ConfigError("an invite of this run is a secret", hint="make one with `atoll invite`")
        return self.link

    def row(self, number: int, *, final: bool = True) -> None:
        """Another round closed."""
        self.rows.append(msgspec.structs.replace(ROUND_ROW, round=number, final=final))
