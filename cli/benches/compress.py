"""`bench compress`: encode and fold, beside the published pipeline and memcpy; one process, one thread."""

import asyncio
from collections.abc import Callable

from atoll.cli.benches.report import Bar, Row, median, paired_ratio, row
from atoll.node import dumps
from atoll.node.compress import pace
from atoll.protocols.arena import CHUNK
from atoll.protocols.errors import ConfigError, Unreachable

MILLIONS = 64
QUICK_CHUNKS, TURNS = 256, 5
ENCODE_OVER_COPY, ENCODE_OVER_PUBLISHED = Bar("<=", 3.5), Bar(">=", 6)
FOLD_OVER_COPY, FOLD_OVER_PUBLISHED = Bar("<=", 2.5), Bar(">=", 8)
BYTES_PER_PARAMETER = Bar("<=", 0.0205)
ERROR_RATIO = Bar("<=", 0.3333)
EXTRA_MEMORY = Bar("<=", 0.05)


async def measure(quick: bool, say: Callable[[str], None], millions: int = MILLIONS) -> list[Row]:
    """All rows, of `millions` Mi parameters."""
    chunks = QUICK_CHUNKS if quick else millions * 2**20 // CHUNK
    paces = await asyncio.to_thread(pace.measure, chunks, 1 if quick else TURNS, say)
    say("training for real values")
    found = await asyncio.to_thread(dumped, quick)
    return [*rows_of(paces, chunks * CHUNK), found]


def dumped(quick: bool) -> Row:
    """Both quantisers on what members of a real run would send."""
    metric = "error of the values, training run: ours / published"
    try:
        found = dumps.measure((0,) if quick else dumps.ROUNDS)
    except (ConfigError, Unreachable) as error:
        return row(metric, None, "x", ERROR_RATIO, note=f"no text to train on: {error}")
    ratios = [each.ours / each.published for each in found]
    rounds = f"rounds {found[0].round} … {found[-1].round} of tiny"
    spread = f"{min(ratios):.3f} … {max(ratios):.3f} over {len(ratios)} dumps, {rounds}"
    both = f"medians {median([e.ours for e in found]):.4f} and {median([e.published for e in found]):.4f}"
    return row(metric, median(ratios), "x", ERROR_RATIO, note=f"{spread}; {both}")


def rows_of(paces: pace.Paces, parameters: int) -> list[Row]:
    """The figures, each way beside the memcpy that ran just before it."""
    extra = None if paces.extra_bytes is None else paces.extra_bytes / (4 * parameters)
    fold = f"decode + fold of {pace.PEERS}"
    return [
        row("memcpy", _ms(paces, "encode: memcpy"), "ms", note=f"{parameters:,} float32"),
        *_speed(paces, "encode", "encode", ENCODE_OVER_COPY, ENCODE_OVER_PUBLISHED),
        *_speed(paces, "fold", fold, FOLD_OVER_COPY, FOLD_OVER_PUBLISHED),
        row("wire", paces.ours_bytes / parameters, "B/parameter", BYTES_PER_PARAMETER),
        row("wire: published", paces.published_bytes / parameters, "B/parameter"),
        *(
            row(
                f"error of the values, {kind}: ours / published", ours / theirs, "x", ERROR_RATIO, note="synthetic"
            )
            for kind, (ours, theirs) in paces.errors.items()
        ),
        row(
            "peak extra memory while encoding",
            extra,
            "of fp32",
            EXTRA_MEMORY,
            note="this system does not tell" if extra is None else "payload included",
        ),
        row("first call in this process", paces.first_call_s, "s", note="compiles once per machine, then loads"),
    ]


def _speed(paces: pace.Paces, name: str, label: str, over_copy: Bar, over_published: Bar) -> list[Row]:
    ours, theirs = paces.seconds[name], paces.seconds[f"{name} published"]
    return [
        row(f"{label}: ours", _ms(paces, name), "ms"),
        row(f"{label}: published", _ms(paces, f"{name} published"), "ms"),
        row(f"{label}: ours / memcpy", paired_ratio(ours, paces.seconds[f"{name}: memcpy"]), "x", over_copy),
        row(f"{label}: published / ours", paired_ratio(theirs, ours), "x", over_published),
    ]


def _ms(paces: pace.Paces, name: str) -> float | None:
    found = median(paces.seconds[name])
    return None if found is None else 1000 * found
