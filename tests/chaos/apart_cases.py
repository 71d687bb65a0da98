"""F6, long: both sides of a partition go on for many rounds; then they meet, and each also goes on alone.

A side goes on alone from copies of its homes, made at the heal while all processes were stopped, in a lab of its
own: the two lives of an identity never meet.
"""

import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch

from atoll.cli.sim.homes import History, read_homes
from atoll.cli.sim.oracle import last_rows
from atoll.node.checkpoint.local import FINAL
from atoll.node.import_export.export_run import load_saved
from atoll.node.learning.data.dataset import open_dataset
from atoll.node.learning.data.shakespeare import default_cache
from atoll.node.learning.inner.evaluate import evaluate
from atoll.node.learning.model import bridge
from atoll.node.learning.model.decoder import Decoder, loss_of
from atoll.node.learning.outer.fixed import to_float
from atoll.protocols.ids import PeerId
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.run_spec import RunSpec
from atoll_lab.node import LabNode, until
from tests.chaos.accounts import Change, account, contributions_of, loss_at, read_changes
from tests.chaos.heal_times import healed, read_journals
from tests.chaos.kill_cases import judged
from tests.chaos.net_cases import HEAL_ROUNDS, LIMIT_S, unstarted
from tests.chaos.report import Result
from tests.chaos.stopped import stopped

CUT, FULL_CUT = 20, 100
"""Final rounds of each side between cut and heal."""
TOGETHER, AFTER = 10, 10
"""Final rounds before the cut; rounds that were trained after the heal, when losses are compared."""
AROUND = 3
"""So many rounds before and after these the loss is taken, too: a state may be missed on a busy machine."""
LONG_S = 3600.0
LOOK_S = 0.5
ROUNDS = 400
RUN = (f"outer.rounds={ROUNDS}", "outer.stages=[[0,4]]", f"inner.total_steps={4 * ROUNDS}")
"""The presets' pace. Four steps a round, because two cores carry all nodes."""
TEXT = "builtin:shakespeare"
WINDOWS = 256


class Heal(NamedTuple):
    """A partition that was healed, and the two sides as they were then."""

    before: int
    """Newest round that was final on all when they were cut."""
    at: float
    """Seconds since 1970."""
    histories: list[History]
    """Of all nodes."""
    sides: tuple[range, range]
    """Numbers of the nodes."""

    def begun(self, side: range) -> int:
        """The newest round to which this side had contributed. It may be far ahead of the newest final one."""
        return max(body.round for number in side for body in contributions_of(self.histories[number]))


def apart(name: str, sizes: tuple[int, int]) -> Callable[[Path, int, bool], Result]:
    """The case that cuts a run into two sides of these sizes."""
    sides = (range(sizes[0]), range(sizes[0], sum(sizes)))

    def case(folder: Path, seed: int, full: bool) -> Result:
        homes, copies = folder / "homes", folder / "at-heal"
        with unstarted(homes, sum(sizes)) as town:
            town.start(RUN, TEXT, seed)
            until("all train together", lambda: _at_times(lambda: min(town.finals()) >= TOGETHER), LIMIT_S)
            town.cut(*sides)
            before = town.finals()
            goal = max(before) + (FULL_CUT if full else CUT)
            until(f"round {goal} on all", lambda: _at_times(lambda: min(town.finals()) >= goal), LONG_S)
            with stopped(town.nodes):
                shutil.copytree(homes, copies, ignore=shutil.ignore_patterns("*.sock"))
            town.heal()
            heal = Heal(min(before), time.time(), read_homes(copies), sides)
            begun = [heal.begun(side) for side in sides]
            seats = [town.nodes[side.start] for side in sides]
            _take_states(seats, states_wanted(begun), folder / "together")
            until("one chain", lambda: _at_times(town.one_chain), LIMIT_S)
        for side, number in zip(sides, begun, strict=True):
            _go_on_alone(copies, folder / f"alone-{side.start}", side, number)
        return _result(name, seed, folder, heal)

    return case


def _go_on_alone(copies: Path, folder: Path, side: range, begun: int) -> None:
    shutil.copytree(copies, folder / "homes")
    with unstarted(folder / "homes", len(list(copies.iterdir()))) as town:
        run_file = town.nodes[0].home.run_file("tiny")  # of the node that made the run, even if it is not started
        seats = [town.nodes[number] for number in side]
        for node in seats:
            node.launch(run_file)
        _take_states(seats[:1], states_wanted([begun]), folder / "states")


def states_wanted(begun: Collection[int]) -> range:
    """Rounds around the one that is compared, for sides that had begun these rounds at the heal."""
    return range(min(begun) + AFTER - AROUND, max(begun) + AFTER + AROUND + 1)


def _take_states(nodes: Sequence[LabNode], wanted: range, folder: Path) -> None:
    """Copy what nodes save while these rounds become final."""
    taken = dict.fromkeys(range(len(nodes)), -1)

    def is_over() -> bool:
        for number, node in enumerate(nodes):
            final = node.status().get("final", -1)
            if final in wanted and final > taken[number]:
                with stopped([node]):
                    (state,) = node.home.root.glob("runs/*/state")
                    shutil.copytree(state, folder / f"{number}-{final}" / "state")
            taken[number] = max(final, taken[number])
        return min(taken.values()) >= wanted.stop

    until(f"round {wanted.stop} is final", lambda: _at_times(is_over), LIMIT_S)


def _at_times(true: Callable[[], bool]) -> bool:
    """Ask, and wait: who asks a busy machine all the time takes its CPU."""
    time.sleep(LOOK_S)
    return true()


def _finals(history: History) -> dict[int, str]:
    """State digests of its final rounds, hex."""
    return {number: row.digest for number, row in last_rows(history.rows).items() if row.final}


def _losses(folder: Path, histories: Iterable[History]) -> dict[int, float]:
    """Validation losses of the saved states in a folder that became final, by round, in bits per byte."""
    losses = dict[int, float]()
    finals = {at: state for history in histories for at, state in _finals(history).items()}
    for place in sorted(folder.iterdir()):
        spec = next(iter(histories)).spec
        found = load_saved(spec, place)
        if found is not None and finals.get(found.body.final) == found.body.state.hex():
            losses[found.body.final] = _validation(spec, found.tensors[FINAL])
    return losses


def _validation(spec: RunSpec, theta_C4096: torch.Tensor) -> float:
    arena, module = arena_of(spec.model), Decoder(spec.model)
    named = {name: torch.empty(value.shape) for name, value in module.named_parameters()}
    bridge.write_rows(named, arena, 0, to_float(theta_C4096))
    module.load_state_dict(named)
    data = open_dataset(spec.data, spec.model.context, "", default_cache())
    return evaluate(module, loss_of, data.validation(WINDOWS), data.validation_bytes(WINDOWS)).val_bpb


def _result(name: str, seed: int, folder: Path, heal: Heal) -> Result:
    homes = folder / "homes"
    ended = read_homes(homes)
    changes = {history.peer: read_changes(homes / history.name) for history in ended}
    finals, moved = read_journals([homes / history.name for history in ended])
    after = healed(finals, moved, len(ended), heal.at)
    told, broken = tokens_of(ended, changes, heal)
    stayed = [side for side in heal.sides if not any(changes[ended[number].peer] for number in side)]
    compared = _compared(folder, ended, heal, stayed[0]) if len(stayed) == 1 else None
    result = judged(name, seed, homes, "; ".join([after.line if after else "they never met", told, f"{compared}"]))
    result.broken += broken
    if after is None or after.rounds > HEAL_ROUNDS:
        result.broken.append(f"a healed partition has one digest within {HEAL_ROUNDS} rounds")
    if compared is None or not compared.holds:
        result.broken.append("ten rounds after the heal the loss is below that of the better side alone")
    return result


def tokens_of(
    ended: Sequence[History], changes: Mapping[PeerId, Sequence[Change]], heal: Heal
) -> tuple[str, list[str]]:
    """What became of the work of each side since the cut: for people, and a line for each contribution lost."""
    told, lost = list[str](), list[str]()
    last = min(max(map(heal.begun, heal.sides)), *(max(_finals(history)) for history in ended))
    for side in heal.sides:
        found = account(
            [ended[number] for number in side], ended, heal.histories, changes, range(heal.before + 1, last + 1)
        )
        told.append(f"{len(side)} nodes: {found.line}")
        lost += found.lost
    return "; ".join(told), lost


class Compared(NamedTuple):
    """Losses in bits per byte, so many rounds after the heal; None where no state was caught on one side of it."""

    together: float | None
    alone: tuple[float | None, ...]
    """Of each side."""

    @property
    def holds(self) -> bool:
        """Whether the merged run is better than the better side alone."""
        known = [loss for loss in self.alone if loss is not None]
        return self.together is not None and len(known) == len(self.alone) and self.together < min(known)

    def __str__(self) -> str:
        alone = ", ".join("unknown" if loss is None else f"{loss:.4f}" for loss in self.alone)
        together = "unknown" if self.together is None else f"{self.together:.4f}"
        return f"loss {AFTER} rounds later {together} bits per byte, each side alone {alone}"


def as_long(histories: Iterable[History], begun: int, members: int) -> int:
    """The first round until which a side had as many contributions as all its members make in AFTER rounds.

    A side that goes on alone begins with a start, and a round may lack a member.
    """
    sizes = {
        number: len(row.contributors)
        for history in histories
        for number, row in last_rows(history.rows).items()
        if row.final and number > begun
    }
    made = accumulate(sizes[number] for number in sorted(sizes))
    return next((at for at, sum_ in zip(sorted(sizes), made, strict=True) if sum_ >= AFTER * members), -1)


def _compared(folder: Path, ended: Sequence[History], heal: Heal, stayed: range) -> Compared:
    together = loss_at(_losses(folder / "together", ended), heal.begun(stayed) + AFTER)
    alone = list[float | None]()
    for side in heal.sides:
        place = folder / f"alone-{side.start}"
        found = [read_homes(place / "homes")[number] for number in side]
        losses = _losses(place / "states", found)
        alone.append(loss_at(losses, as_long(found, heal.begun(side), len(side))))
    return Compared(together, tuple(alone))


CASES = {name: apart(name, sizes) for name, sizes in (("apart-halves", (2, 2)), ("apart-minority", (5, 2)))}
