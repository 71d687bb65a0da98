"""`bench experts`: what four members that share the experts of a mixture save, beside training all of them."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from atoll.node.runs.capacity.memory_model import FROZEN_BYTES
from atoll.protocols.run.model_spec import ModelSpec
from atoll_bench.child import started
from atoll_bench.experts import experts_loss, experts_owner
from atoll_bench.experts.experts_gpu import gpu_rows
from atoll_bench.experts.experts_members import MEMBERS, shares_of, spec_of
from atoll_bench.experts.held import Held
from atoll_bench.experts.logits import RIVAL, is_installed
from atoll_bench.experts.model_pace import expected_ratio
from atoll_bench.report import Bar, Row, median, paired_ratio, row

CHILD = "atoll_bench.experts.experts_node"
PRESET, QUICK_PRESET = "moe-12m", "moe-smoke"
SEQUENCES, TURNS, PROCESSES = 8, 15, 3
LOSS_ROUNDS, QUICK_LOSS = (24, 8), (8, 1)
"""Rounds and steps of one."""
MEMORY, UPLOAD = Bar("<=", 0.1), Bar("<=", 1.05)
COUNTS = [1, 2, 3, 8]
"""Members that go on with what MEMBERS saved."""
SAME = Bar("<=", 0)
LOGITS = Bar("<=", 1e-5)
TIME_ALLOWED = 0.1
ORDER_S = 600.0

Say = Callable[[str], None]


async def measure(quick: bool, say: Say, loss: bool = False, device: str = "cpu") -> list[Row]:
    """All rows, always; what was not measured says why. `loss`: also train whole runs, which takes hours.
    `device`: `cuda` for the rows of a GPU, too.
    """
    preset = QUICK_PRESET if quick else PRESET
    say("memory: a process for each measurement")
    rows = await memory_rows(preset, 1 if quick else PROCESSES)
    say("payloads, export, resumption")
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        rows += await story_rows(folder, preset, say)
    say("time: a share and all experts in turns")
    rows += await time_rows(preset, *((1, 1) if quick else (SEQUENCES, TURNS)))
    say("an owner dies: four nodes on loopback")
    rows += experts_owner.unmeasured_rows() if quick else await experts_owner.owner_rows(say)
    say("a cap of a GPU's memory")
    rows += await gpu_rows(quick, device)
    if not loss:
        return [*rows, *experts_loss.unmeasured_rows()]
    return [*rows, *await experts_loss.loss_rows(preset, *(QUICK_LOSS if quick else LOSS_ROUNDS), say)]


async def memory_rows(preset: str, processes: int) -> list[Row]:
    """Bytes of the device's side after a step, beside 16·T + b·F; and what the processes grew by."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for _ in range(processes):
        for kind in (("share", "float32"), ("all", "float32")):
            found.setdefault(kind, []).append(await _asked("hold", preset=preset, trained=kind[0], frozen=kind[1]))
    for frozen in tuple(FROZEN_BYTES)[1:]:
        found["share", frozen] = [await _asked("hold", preset=preset, trained="share", frozen=frozen)]
    said = {kind: each[0]["arithmetic"] for kind, each in found.items()}
    held = {kind: Held(*each[0]["held"]) for kind, each in found.items()}
    rows = [
        row(
            f"memory, {trained} trained, frozen {frozen}: distance from 16·T + b·F",
            abs(sum(held[trained, frozen]) / said[trained, frozen] - 1),
            "of it",
            MEMORY,
            note=_kinds(held[trained, frozen], said[trained, frozen]),
        )
        for trained, frozen in found
    ]
    whole = sum(held["all", "float32"])
    rows += [row(f"memory, share / all, frozen {f}", sum(held["share", f]) / whole, "x") for f in FROZEN_BYTES]
    return [*rows, peak_row(found["share", "float32"], found["all", "float32"])]


def peak_row(share: Sequence[Mapping[str, Any]], everything: Sequence[Mapping[str, Any]]) -> Row:
    """What the system says of the processes: what a step needs for a moment is in it."""
    ratios = [a["peak"] / b["peak"] for a, b in zip(share, everything, strict=True)]
    said = share[0]["arithmetic"] / everything[0]["arithmetic"]
    note = f"{min(ratios):.3f} … {max(ratios):.3f} over {len(ratios)} pairs of processes; arithmetic {said:.3f}"
    return row("memory, peak growth of the process, share / all", median(ratios), "x", note=note)


async def story_rows(folder: str, preset: str, say: Say) -> list[Row]:
    """Four members train one round; its payloads, and what comes out of the saved state."""
    async with started(CHILD) as child:
        sent = await child.ask("payloads", ORDER_S, folder=folder, preset=preset)
        rows = payload_rows(spec_of(preset).model, sent)
        rows += resume_rows(await child.ask("resume", ORDER_S, folder=folder, preset=preset, counts=COUNTS))
        metric = f"export: largest difference of a logit in {RIVAL}"
        if not is_installed():
            say(f"{RIVAL} is not installed: logits are not compared")
            return [*rows, row(metric, None, "", LOGITS, note=f"{RIVAL} is not installed")]
        logits = await child.ask("logits", ORDER_S, folder=folder, preset=preset)
        return [*rows, row(metric, logits["difference"], "", LOGITS, note=logits["class"])]


def resume_rows(found: Mapping[str, Any]) -> list[Row]:
    """Whether a run that goes on begins with the bits that were saved."""
    note = f"a checkpoint of {found['bytes'] / 1e6:.0f} MB"
    metrics = {n: f"resume {MEMBERS} -> {n}: values that differ" for n in COUNTS}
    return [row(metrics[n], found["differ"][str(n)], "", SAME, note=note) for n in COUNTS]


def payload_rows(model: ModelSpec, sent: Mapping[str, Any]) -> list[Row]:
    """Bytes as they were encoded, beside (S + E·P/N) / (S + E·P)."""
    assert model.experts is not None
    in_experts = 3 * model.dim * model.experts.ffn * model.layers * model.experts.count
    shared = model.parameters - in_experts
    said = (shared + in_experts / MEMBERS) / model.parameters
    largest, whole = max(sent["shares"]), sent["whole"]
    note = f"{', '.join(f'{size:,}' for size in sent['shares'])} B; who trains all sends {whole:,} B"
    return [
        row("upload of a round, largest share / all", largest / whole, "x", note=note),
        row("the same over (S + E·P/N) / (S + E·P)", largest / whole / said, "x", UPLOAD, note=f"{said:.3f}"),
        row("digests after the round", sent["states"], "", Bar("<=", 1)),
    ]


async def time_rows(preset: str, sequences: int, turns: int) -> list[Row]:
    """CPU time of forward and backward in one thread; each turn of one beside the turn of the other."""
    model = spec_of(preset).model
    assert model.experts is not None
    owned = len(shares_of(spec_of(preset), MEMBERS)[0])
    expected = expected_ratio(owned, model.experts.count)
    seconds = await _asked("paces", preset=preset, sequences=sequences, turns=turns)
    layer, step = (paired_ratio(seconds[f"{part}: some"], seconds[f"{part}: all"]) for part in ("layer", "step"))
    about = (
        f"(2 + k/E)/3 = {expected:.3f} with {owned} of {model.experts.count}; {sequences * model.context} tokens"
    )
    bar = Bar("<=", round(expected + TIME_ALLOWED, 4))
    return [
        row("time of a mixture's forward and backward, share / all", layer, "x", bar, note=about),
        row("time of a whole step, share / all", step, "x", note="attention and head are trained by all"),
    ]


async def _asked(order: str, **arguments: Any) -> Any:
    """The answer of a process that does nothing else. Raises LocalFault."""
    async with started(CHILD) as child:
        return await child.ask(order, ORDER_S, **arguments)


def _kinds(held: Held, said: int) -> str:
    parts = ", ".join(f"{name} {size / 1e6:.1f}" for name, size in held._asdict().items())
    return f"{sum(held) / 1e6:.1f} MB of {said / 1e6:.1f}: {parts}"
