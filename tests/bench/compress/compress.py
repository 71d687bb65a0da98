"""`bench compress`: encode and fold, beside the published pipeline and memcpy.

On the CPU in one process with one thread; with `--device cuda` on a GPU, and then the bits are compared, too.
"""

import asyncio
import importlib
import importlib.util
from collections.abc import Callable

import msgspec

from atoll.protocols.errors import ConfigError, Unreachable
from atoll.protocols.run.arena import CHUNK
from atoll_bench.compress import codec_pace as pace
from atoll_bench.compress import dumps, whole_path
from atoll_bench.report import Bar, Row, median, paired_ratio, row

MILLIONS = 64
QUICK_CHUNKS, TURNS = 256, 5
ENCODE_OVER_COPY, ENCODE_OVER_PUBLISHED = Bar("<=", 3.5), Bar(">=", 6)
FOLD_OVER_COPY, FOLD_OVER_PUBLISHED = Bar("<=", 2.5), Bar(">=", 8)
RULE_OVER_PLAIN = Bar("<=", 2)
WHOLE_OVER_COPY = Bar("<=", 4.5)
WHOLE = (("50m", None), ("moe-12m", None), ("moe-12m", 4))
"""Presets, and experts of each layer that are trained, whose encode is measured from the module on."""
BYTES_PER_PARAMETER = Bar("<=", 0.0205)
ERROR_RATIO = Bar("<=", 0.3333)
EXTRA_MEMORY = Bar("<=", 0.05)
GPU_MILLIONS, GPU_TURNS = 1024, 20
GPU_ENCODE_OVER_COPY, GPU_ENCODE_OVER_PUBLISHED = Bar("<=", 2.8), Bar(">=", 5)
NO_DIFFERENCE = Bar("<=", 0)
NOT_HERE = "not measured: no GPU here (--device cuda)"


async def measure(
    quick: bool, say: Callable[[str], None], millions: int | None = None, device: str = "cpu"
) -> list[Row]:
    """All rows of a device, of `millions` Mi parameters (on the CPU 64, on a GPU 1024)."""
    millions = millions or (MILLIONS if device == "cpu" else GPU_MILLIONS)
    chunks = QUICK_CHUNKS if quick else millions * 2**20 // CHUNK
    if device != "cpu":
        return await asyncio.to_thread(on_gpu, chunks, 1 if quick else GPU_TURNS, say, device)
    turns = 1 if quick else TURNS
    paces = await asyncio.to_thread(pace.measure, chunks, turns, say)
    say("a worker's encode")
    cases = WHOLE[-1:] if quick else WHOLE
    whole = [await asyncio.to_thread(whole_row, name, experts, turns) for name, experts in cases]
    say("training for real values")
    found = await asyncio.to_thread(dumped, quick)
    return [*rows_of(paces, chunks * CHUNK), *whole, found, *unmeasured_gpu_rows()]


def whole_row(name: str, experts: int | None, turns: int) -> Row:
    """A worker's encode, from the module's memory to the payload."""
    encodes, copies = whole_path.seconds(name, turns, experts)
    part = "" if experts is None else f", {experts} experts of a layer"
    note = f"CPU time; memcpy {1000 * (median(copies) or 0):.1f} ms"
    return row(
        f"{name}{part}: a worker's encode / memcpy", paired_ratio(encodes, copies), "x", WHOLE_OVER_COPY, note=note
    )


def on_gpu(chunks: int, turns: int, say: Callable[[str], None], device: str) -> list[Row]:
    """The figures of a GPU. Raises ConfigError where there is none."""
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("there is no triton here: torch's CUDA build brings it")
    gpu_pace = importlib.import_module("atoll_bench.compress.gpu_pace")
    paces: pace.Paces = gpu_pace.measure(chunks, MILLIONS * 2**20 // CHUNK, turns, say, device)
    compared = min(chunks, MILLIONS * 2**20 // CHUNK) * CHUNK
    return gpu_rows_of(paces, chunks * CHUNK, compared)


def unmeasured_gpu_rows() -> list[Row]:
    """Those of a GPU that have a bar, of a bench that had none: what was not measured is not reached."""
    rows = gpu_rows_of(pace.Paces(), 1, 0)
    return [msgspec.structs.replace(each, value=None, passed=None, note=NOT_HERE) for each in rows if each.bar]


def gpu_rows_of(paces: pace.Paces, parameters: int, compared: int) -> list[Row]:
    """The figures of a GPU; as many parameters as `compared` were held against the CPU's bits."""
    extra = None if paces.extra_bytes is None else paces.extra_bytes / (4 * parameters)
    bits = f"{compared:,} parameters: payload, e"
    return [
        row("GPU: what differs from the CPU", len(paces.differs), "", NO_DIFFERENCE, note=bits),
        row("GPU: memcpy on the device", _ms(paces, "encode: memcpy"), "ms", note=f"{parameters:,} float32"),
        *_speed(paces, "encode", "GPU: encode", GPU_ENCODE_OVER_COPY, GPU_ENCODE_OVER_PUBLISHED),
        row("GPU: payload to the host", _ms(paces, "fetch"), "ms", note=f"{paces.ours_bytes:,} bytes"),
        row(
            "GPU: peak extra memory while encoding",
            extra,
            "of fp32",
            note="payload and scratch, e's second array not",
        ),
        row("GPU: first call in this process", paces.first_call_s, "s", note="compiles, then keeps machine code"),
    ]


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
        row(f"{fold}: with momentum / without", _fold_ratio(paces, "momentum"), "x", RULE_OVER_PLAIN),
        row(f"{fold}: with co2 / without", _fold_ratio(paces, "co2"), "x", RULE_OVER_PLAIN),
        row(f"{fold}: with edit / without", _fold_ratio(paces, "edit"), "x", RULE_OVER_PLAIN),
        *limit_rows(paces, fold, parameters),
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


def limit_rows(paces: pace.Paces, fold: str, parameters: int) -> list[Row]:
    """Streams of this machine's memory, and each fold over the slower one of its bytes and its arithmetic."""
    rows = []
    for name in ("memory read", "memory written", "memory written past the caches"):
        found = _ms(paces, name)
        rows.append(row(name, None if found is None else 4e-6 * parameters / found, "GB/s"))
    for rule in ("", " with momentum", " with co2"):
        label, folds = fold + rule.replace(" with", ": with"), paces.seconds.get(f"fold{rule}", [])
        moved, computed = (paces.seconds.get(f"fold{rule}: {part}", []) for part in ("bytes", "arithmetic"))
        for part, taken in (("bytes", moved), ("arithmetic", computed)):
            copies = paces.seconds.get(f"fold{rule}: {part}: memcpy", [])
            rows.append(row(f"{label}, {part} alone / memcpy", paired_ratio(taken, copies), "x"))
        pairs = list(zip(moved, computed, strict=True))
        both = paired_ratio(folds, [sum(pair) for pair in pairs])
        note = "" if both is None else f"{both:.2f} of the sum of both"
        rows.append(
            row(f"{label} over its roofline", paired_ratio(folds, [max(p) for p in pairs]), "x", note=note)
        )
    return rows


def _speed(
    paces: pace.Paces, name: str, label: str, over_copy: Bar | None, over_published: Bar | None
) -> list[Row]:
    ours, theirs, copies = (paces.seconds.get(each, []) for each in (name, f"{name} published", f"{name}: memcpy"))
    return [
        row(f"{label}: ours", _ms(paces, name), "ms"),
        row(f"{label}: published", _ms(paces, f"{name} published"), "ms"),
        row(f"{label}: ours / memcpy", paired_ratio(ours, copies), "x", over_copy),
        row(f"{label}: published / ours", paired_ratio(theirs, ours), "x", over_published),
    ]


def _fold_ratio(paces: pace.Paces, rule: str) -> float | None:
    return paired_ratio(paces.seconds.get(f"fold with {rule}", []), paces.seconds.get("fold", []))


def _ms(paces: pace.Paces, name: str) -> float | None:
    found = median(paces.seconds.get(name, []))
    return None if found is None else 1000 * found
