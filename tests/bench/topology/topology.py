"""`bench topology`: bytes per member and round when everybody gets everything, and when slices are reduced.

Members run over the simulated network in virtual time; their payloads, records and openings are the real ones, and
the bytes are what the hosts' streams carried. Nothing here depends on the speed of this machine.
"""

import asyncio
from collections.abc import Callable, Sequence

from atoll.protocols.ids import RunId, digest
from atoll.protocols.ledger.reduction import ReductionRules
from atoll.protocols.run.arena import CHUNK
from atoll.protocols.run.payload import payload_bytes
from atoll_bench.report import Bar, Row, row
from atoll_bench.topology.reduction_trial import losses
from atoll_bench.topology.topology_swarm import FEEDBACK, RoundResult, Trial, first_payloads, run_trial

MEMBERS, QUICK_MEMBERS = (4, 8, 16, 32, 64), (4, 8)
MILLIONS, QUICK_CHUNKS, SMALL_CHUNKS = 16, 64, 128
K, REDUCED_K, FLOOR_256 = 64, 128, 64
FAULT_MEMBERS, FAULT_ROUNDS = 32, 8
QUALITY_MEMBERS, QUALITY_ROUNDS = 32, 12
SEED = 1
FLAT = Bar("<=", 0.2)
ONE = Bar("<=", 1)
CAUGHT = Bar(">=", 1)


async def measure(quick: bool, say: Callable[[str], None], millions: int = MILLIONS) -> list[Row]:
    """All rows, of `millions` Mi parameters."""
    return await asyncio.to_thread(_measure, quick, say, millions)


def _measure(quick: bool, say: Callable[[str], None], millions: int) -> list[Row]:
    chunks = QUICK_CHUNKS if quick else millions * 2**20 // CHUNK
    small = QUICK_CHUNKS if quick else SMALL_CHUNKS
    counts = QUICK_MEMBERS if quick else MEMBERS
    return [
        *_traffic(counts, rules_of(chunks), say),
        *_faults(QUICK_MEMBERS[-1] if quick else FAULT_MEMBERS, rules_of(small), say),
        *_quality(QUICK_MEMBERS[-1] if quick else QUALITY_MEMBERS, 3 if quick else QUALITY_ROUNDS, small, say),
    ]


def rules_of(chunks: int, reduced_k: int = REDUCED_K) -> ReductionRules:
    """Of a trial's run."""
    return ReductionRules(RunId(digest(b"bench topology")), chunks, K, reduced_k, FLOOR_256)


def _traffic(counts: Sequence[int], rules: ReductionRules, say: Callable[[str], None]) -> list[Row]:
    say(f"payloads of {max(counts)} members")
    payloads = first_payloads(max(counts), rules, SEED)
    gathered, reduced = ({}, {})  # type: tuple[dict[int, RoundResult], dict[int, RoundResult]]
    for count in counts:
        for name, results, is_reduced in (("all-gather", gathered, False), ("reduce-scatter", reduced, True)):
            say(f"{name}, {count} members")
            # The second round of a reduced run: in the first there is no error feedback yet that openings show.
            trial = Trial(count, is_reduced, rules, 1 + is_reduced, seed=SEED, payloads=payloads)
            results[count] = run_trial(trial)[-1]
    return traffic_rows(gathered, reduced, len(payloads[0]))


def traffic_rows(gathered: dict[int, RoundResult], reduced: dict[int, RoundResult], payload: int) -> list[Row]:
    """Bytes by number of members, and how flat they are."""
    rows = [row("payload of one member", payload, "B", note=f"k = {K} of 4096; reductions keep {REDUCED_K}")]
    for name, results in (("all-gather", gathered), ("reduce-scatter", reduced)):
        rows += [
            row(f"{name}, R = {count}", mean(got.up), "B/member", note=_note(got))
            for count, got in results.items()
        ]
    every = [*gathered.values(), *reduced.values()]
    flat = [mean(got.up) for got in reduced.values()]
    middle = sum(flat) / len(flat)
    most = max(reduced)
    return [
        *rows,
        row(
            "reduce-scatter: furthest from its mean over R",
            max(abs(each / middle - 1) for each in flat),
            "of it",
            FLAT,
        ),
        row("reduce-scatter: largest / smallest over R", max(flat) / min(flat), "x", note=_extremes(reduced)),
        row(f"all-gather / reduce-scatter, R = {most}", mean(gathered[most].up) / mean(reduced[most].up), "x"),
        row("digests after each round, most", max(len(got.digests) for got in every), "", ONE),
    ]


def _extremes(results: dict[int, RoundResult]) -> str:
    up = {count: mean(got.up) for count, got in results.items()}
    return f"R = {max(up, key=up.__getitem__)} over R = {min(up, key=up.__getitem__)}"


def _note(got: RoundResult) -> str:
    down = f"most: up {max(got.up):,}, down {max(got.down):,}; records {got.records:,}"
    return f"{down}; {got.openings} openings" if got.openings else down


def mean(values: Sequence[int]) -> float:
    """Of what is not empty."""
    return sum(values) / len(values)


def _faults(members: int, rules: ReductionRules, say: Callable[[str], None]) -> list[Row]:
    say("a reducer dies, a reducer lies")
    usual = run_trial(Trial(members, True, rules, seed=SEED))[0]
    missing = run_trial(Trial(members, True, rules, behaviour={1: "missing"}, seed=SEED))[0]
    lying = run_trial(
        Trial(members, True, rules, FAULT_ROUNDS, {1: "lying"}, until_caught=True, always_sample=True, seed=SEED)
    )
    caught, payload = lying[-1], payload_bytes("sparse2", rules.chunks, K)
    label = f"R = {members}"
    return [
        row(
            f"{label}, a reducer dies: bytes over the usual",
            _more(missing, usual, payload),
            "payloads",
            note="per member",
        ),
        row(f"{label}, a reducer dies: slices folded raw", missing.raw_slices, "", note="at each member"),
        row(f"{label}, a reducer dies: digests", len(missing.digests), "", ONE),
        row(
            f"{label}, a reducer lies: rounds until it is caught",
            len(lying),
            "",
            note=f"{caught.openings} openings",
        ),
        row(
            f"{label}, a reducer lies: members with a checked proof",
            caught.caught / len(caught.up),
            "of all",
            CAUGHT,
        ),
        row(
            f"{label}, a reducer lies: bytes over the usual",
            _more(caught, usual, payload),
            "payloads",
            note="proof, raw rows, openings",
        ),
        row(
            f"{label}, a reducer lies: digests, any round",
            max(max(len(got.digests), len(got.first_digests)) for got in lying),
            "",
            ONE,
            note="before and after it is caught",
        ),
    ]


def _more(got: RoundResult, usual: RoundResult, payload: int) -> float:
    return (mean(got.down) - mean(usual.down)) / payload


def _quality(members: int, rounds: int, chunks: int, say: Callable[[str], None]) -> list[Row]:
    rows: list[Row] = []
    for factor in (1, 2, 4):
        say(f"error of reductions of {factor} k")
        found = losses(members, factor * K, rounds, rules_of(chunks), FEEDBACK, SEED)
        size = payload_bytes("sparse2", chunks, factor * K) / payload_bytes("sparse2", chunks, K)
        label = f"R = {members}, reductions of {factor} k"
        rows += [
            row(f"{label}: error of a step", found[-1].step, "of it", note=f"round {rounds}; synthetic"),
            row(f"{label}: error of the sum of {rounds}", found[-1].total, "of it"),
            row(f"{label}: cosine of the sum with the uncompressed mean's", found[-1].reduced_cosine, ""),
            row(f"{label}: bytes", 1 + size, "payloads", note="each way, of many members"),
        ]
    gathered = row(
        f"R = {members}, all-gather: cosine of the sum with the uncompressed mean's", found[-1].gathered_cosine, ""
    )
    return [gathered, *rows]
