"""One audited run in one process: training, encoding, audits, weights and fold are those of nodes."""

import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from atoll.node.learning.compress.folding import OuterStep
from atoll.node.learning.data.dataset import Dataset, RunText
from atoll.node.learning.kernels.compiled import Ints
from atoll.node.learning.model import bridge
from atoll.node.learning.outer.fixed import clear, to_float
from atoll.node.runs.presets import preset
from atoll.node.worker.audits.measuring import audit
from atoll.node.worker.audits.replays import SentPayloads
from atoll.node.worker.round_trainer import weight_of
from atoll.protocols.audits.copies import weights
from atoll.protocols.audits.standing import Named, audited_by, without_weight
from atoll.protocols.data.shard_order import Turn
from atoll.protocols.ids import PeerId, Round, digest
from atoll.protocols.ledger.records import Verdict
from atoll.protocols.local.worker_messages import AuditRequest, Member
from atoll.protocols.run.run_spec import RunSpec, Stage
from atoll.protocols.run.sections.audits import AuditSpec
from atoll_bench.byzantine import trial
from atoll_bench.byzantine.mixtures import dealt, mixtures

HONEST, SLOW = 8, 0
"""Members that work; the number of one of them that takes a quarter of the steps."""
IDLERS = ("free rider", "copier", "replayer", "noise")
MEMBERS = HONEST + len(IDLERS)
BATCH, STEPS, ROUNDS = 8, 8, 24
EACH = 3
"""Audits that each member makes in a round."""


class Outcome(NamedTuple):
    """In which rounds each idler, and any honest member, had no weight."""

    idle: dict[str, list[int]]
    honest: list[int]
    usual: float
    """Mean of the honest members' verdicts about others that work, in standard deviations."""


class DealtText:
    """The text of members that are unlike: each is dealt its windows, those beside them are anybody's."""

    def __init__(self, data: Dataset, dealt_MW: Ints) -> None:
        self._data, self._dealt_MW = data, dealt_MW
        self.digest, self.num_windows = data.digest, data.num_windows
        self.batch, self.windows_beside = data.batch, data.windows_beside
        self.validation, self.validation_bytes = data.validation, data.validation_bytes

    def windows_of(self, spec: RunSpec, turn: Turn, at_W: Ints) -> Ints:
        """The windows with these numbers of a member's round."""
        first, of_member = turn.round * STEPS * BATCH, self._dealt_MW[slot_of(turn.author)]
        found: Ints = of_member[(first + at_W) % len(of_member)]
        return found


class AuditTrial(trial.Trial):
    """Honest members first. Idlers do no work, audits included."""

    def __init__(
        self,
        seed: int,
        data: Dataset,
        dirichlet: float | None = None,
        *,
        class_W: Ints | None = None,
        muon: bool = False,
        each: int = EACH,
    ) -> None:
        """`muon`: the matrices are moved by Muon, as those of the preset `tiny` are. `each`: audits of a member in
        a round."""
        idle = trial.MEMBERS - HONEST
        super().__init__(
            trial.Case("mean", "free ride", idle, seed), data, audited_spec(seed, muon=muon, each=each)
        )
        self._text: RunText = data
        if dirichlet is not None:
            assert class_W is not None, "unlike members need classes"
            each = min(ROUNDS * STEPS * BATCH, len(class_W) // MEMBERS)
            self._text = DealtText(data, dealt(mixtures(dirichlet, class_W, MEMBERS, seed), class_W, each, seed))
        self._folder = tempfile.TemporaryDirectory()
        self._sets: dict[int, list[Named]] = {}
        self._waiting: dict[PeerId, tuple[Verdict, ...]] = {}
        self._rng = np.random.default_rng(seed)
        self._slow = trial.Members(self.spec, 1)
        self._slow_C4096 = torch.zeros(self.theta_C4096.shape)
        self._said: list[int] = []
        # All have seen the same payloads, so they may share what is remembered of them.
        self._sent = SentPayloads(self._codec.layout(self._arena.chunks), self._rng)

    def outcome(self, rounds: int = ROUNDS) -> Outcome:
        """Train some rounds."""
        found = Outcome({name: [] for name in IDLERS}, [], 0.0)
        with self._folder:
            for number in range(rounds):
                gone = self.audited_round(number)
                for slot, name in enumerate(IDLERS, HONEST):
                    found.idle[name] += [number] * (peer(slot) in gone)
                found.honest.extend(number for slot in range(HONEST) if peer(slot) in gone)
        return found._replace(usual=float(np.mean(self._said or [0])) / 16)

    def audited_round(self, number: int) -> frozenset[PeerId]:
        """One round; the authors that had no weight in it."""
        payloads = self._payloads(number)
        paths = [self._written(slot, payload) for slot, payload in enumerate(payloads)]
        nominal = STEPS * BATCH * self.spec.model.context
        members = []
        for slot, payload in enumerate(payloads):
            tokens = nominal // 4 if slot == SLOW else nominal
            said = self._waiting.pop(peer(slot), ())
            entry = digest(b"audit trial", bytes([self.case.seed, number, slot]))
            blob = digest(payload) if slot < HONEST else digest(payload, entry)
            members.append(Named(entry, peer(slot), weight_of(tokens, nominal), blob, said))
        self._sets[number] = members
        assert self.spec.audit
        gone = without_weight(self.spec.audit, self._sets, number)
        weighed = weights(members, gone)
        counted = [slot for slot, each in enumerate(members) if weighed[each.entry]]
        self.theta_C4096 = clear(
            self._codec.apply_update(
                self.theta_C4096,
                [weighed[members[slot].entry] for slot in counted],
                [payloads[slot] for slot in counted],
                OuterStep(self.spec.outer.alpha_256, self.spec.outer.floor_256),
            ),
            self._padding,
        )
        self._audit_all(number, members, paths)
        return gone

    def _payloads(self, number: int) -> list[bytes]:
        sent = self._train(number)
        sent[SLOW] = self._slow_payload(number)
        tables = torch.stack([self._values(payload) for payload in sent])
        if self._first_C4096 is None:
            self._first_C4096 = tables[1]
        length = tables.norm(dim=-1, keepdim=True).median(dim=0).values
        noise = torch.randn(tables[0].shape, generator=self._noise)
        # The copier copies another one each round, and changes what it copies a little: its bytes are new.
        copied = tables[1 + number % (HONEST - 1)] * (
            1 + 0.01 * torch.randn(tables[0].shape, generator=self._noise)
        )
        nothing = torch.zeros_like(tables[0])
        lies = (nothing, copied, self._first_C4096, noise / noise.norm(dim=-1, keepdim=True) * length)
        return sent + [bytes(self._codec.encode(lie.clone(), nothing, nothing, 1.0)) for lie in lies]

    def _slow_payload(self, number: int) -> bytes:
        anchor_C4096 = to_float(self.theta_C4096)
        steps = [self._batch(number, step)[SLOW][None] for step in range(STEPS // 4)]
        bridge.write_rows(self._named, self._arena, 0, anchor_C4096)
        local = self._slow.train(self._named, steps, number * STEPS)
        mine_C4096 = bridge.gather({name: value[0] for name, value in local.items()}, self._arena)
        return bytes(self._codec.encode(self._slow_C4096, anchor_C4096, mine_C4096, self.spec.compress.feedback))

    def _batch(self, number: int, step: int) -> Tensor:
        found = []
        for slot in range(self._members.count):
            at_W = np.arange(step * BATCH, (step + 1) * BATCH)
            mine_W = self._text.windows_of(self.spec, Turn(number, peer(slot)), at_W)
            found.append(torch.from_numpy(self._data.batch(mine_W)))
        return torch.stack(found)

    def _audit_all(self, number: int, members: list[Named], paths: list[Path]) -> None:
        assert self.spec.audit
        slots = {each.entry: slot for slot, each in enumerate(members)}
        for auditor, drawn in audited_by(slots, self.spec.audit.per_round).items():
            if slots[auditor] < HONEST:
                said = {
                    audited: self._audit(number, members, paths, slots[auditor], slots[audited])
                    for audited in drawn
                }
                self._said += [found for audited, found in said.items() if SLOW < slots[audited] < HONEST]
                self._waiting[peer(slots[auditor])] = tuple(map(Verdict, said, said.values()))

    def _audit(self, number: int, members: list[Named], paths: list[Path], auditor: int, slot: int) -> int:
        def member(at: int) -> Member:
            each = members[at]
            return Member(each.entry, each.author, each.weight, each.payload, str(paths[at]))

        others = self._rng.permutation([at for at in range(MEMBERS) if at != slot])
        tokens = (STEPS // 4 if slot == SLOW else STEPS) * BATCH * self.spec.model.context
        ask = AuditRequest(
            Round(number),
            tokens,
            0,  # windows follow from `self._rng`
            member(slot),
            tuple(member(int(at)) for at in others),
            tuple(map(member, range(MEMBERS))),
            Round(number),
        )
        trained, at = (self._slow, 0) if auditor == SLOW else (self._members, auditor)
        squares = {name: second[at] for name, (_, second) in trained.moments.items()}
        losses_of, theta_C4096 = self._window_losses, self.theta_C4096
        return audit(ask, self.spec, self._text, losses_of, theta_C4096, self._rng, squares, self._sent).excess

    def _window_losses(self, theta_C4096: Tensor, windows_WT1: NDArray[np.int64]) -> list[float]:
        """The same as one window after the other, in one batch."""
        named = {name: torch.empty_like(value) for name, value in self._named.items()}
        bridge.write_rows(named, self._arena, 0, to_float(theta_C4096))
        tokens_WT1 = torch.from_numpy(windows_WT1)
        with torch.no_grad():
            logits_WTV = functional_call(self._members.module, named, (tokens_WT1[:, :-1],))
            loss_N = functional.cross_entropy(
                logits_WTV.flatten(0, 1), tokens_WT1[:, 1:].flatten(), reduction="none"
            )
        found: list[float] = loss_N.view(len(tokens_WT1), -1).mean(1).tolist()
        return found

    def _written(self, slot: int, payload: bytes) -> Path:
        path = Path(self._folder.name) / str(slot)
        path.write_bytes(payload)
        return path


def peer(slot: int) -> PeerId:
    return PeerId(f"member {slot}")


def slot_of(author: str) -> int:
    return int(author.removeprefix("member "))


def audited_spec(seed: int, *, muon: bool = False, each: int = EACH) -> RunSpec:
    """The spec of `trial` with longer rounds and audits of all windows and of three times as many others."""
    spec = trial.spec_of(trial.Case("mean", None, 0, seed))
    replace = msgspec.structs.replace
    if muon:
        tiny = preset("tiny", spec.owner, seed).inner
        spec = replace(spec, inner=replace(spec.inner, optimizer="muon", muon_lr=tiny.muon_lr))
    made: RunSpec = replace(
        spec,
        inner=replace(spec.inner, total_steps=ROUNDS * STEPS, batch=BATCH),
        outer=replace(spec.outer, rounds=ROUNDS, stages=(Stage(0, STEPS),)),
        audit=AuditSpec(windows=2 * BATCH * STEPS, each=each),
    )
    made.check()
    return made
