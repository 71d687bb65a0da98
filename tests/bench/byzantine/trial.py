"""One run with liars in one process: training, encoding and fold are those of a worker."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from msgspec import UNSET
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from atoll.node.learning.compress.codecs import codec_of
from atoll.node.learning.compress.folding import OuterStep, decode
from atoll.node.learning.data.dataset import Dataset, WindowPlace, windows
from atoll.node.learning.inner.evaluate import evaluate
from atoll.node.learning.inner.muon import muon_step
from atoll.node.learning.kernels.compiled import Ints
from atoll.node.learning.model import bridge
from atoll.node.learning.model.decoder import Decoder, loss_of
from atoll.node.learning.model.genesis import genesis
from atoll.node.learning.outer.aggregation import aggregation_of
from atoll.node.learning.outer.fixed import clear, padding_of, to_float
from atoll.node.runs.presets import preset, with_adamw
from atoll.node.worker.round_trainer import WEIGHT_UNIT
from atoll.protocols.identity import Identity
from atoll.protocols.ids import digest
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.learning_rate import learning_rate
from atoll.protocols.run.moments import is_orthogonalized
from atoll.protocols.run.payload import VALUE_BITS
from atoll.protocols.run.run_spec import RunSpec, Stage
from atoll_bench.byzantine.adaptive import ALL, WORKING
from atoll_bench.byzantine.attacks import Seen
from atoll_bench.byzantine.mixtures import dealt, mixtures

MEMBERS, ROUNDS, STEPS, BATCH, LAST = 10, 24, 4, 4, 4
"""Members, rounds, inner steps of a round, sequences of a step, rounds at the end whose loss counts."""
EVALUATED = 32


class Case(NamedTuple):
    """One run: what is different from the others."""

    rule: str
    """`mean`, or one of `outer.aggregate`."""
    attack: str | None
    liars: int
    seed: int = 1
    alpha_256: int = 256
    dirichlet: float | None = None
    """Concentration of the members' mixtures of classes; None: all draw from the whole text."""


def spec_of(case: Case) -> RunSpec:
    """The preset `tiny`, smaller."""
    spec = preset("tiny", Identity(bytes(32)).peer_id, case.seed)
    shape = {"dim": 64, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 128, "context": 32}
    inner = {"warmup_steps": 8, "total_steps": ROUNDS * STEPS, "batch": BATCH}
    outer = {
        "rounds": ROUNDS,
        "stages": (Stage(0, STEPS),),
        "alpha_256": case.alpha_256,
        "overlap_steps": 0,
        "aggregate": UNSET if case.rule == "mean" else case.rule,
    }
    replace = msgspec.structs.replace
    made: RunSpec = replace(
        spec,
        model=replace(spec.model, **shape),
        inner=replace(with_adamw(spec.inner), **inner),  # `Members` trains them as one batch with AdamW
        outer=replace(spec.outer, **outer),
        reduce=None,
    )
    made.check()
    return made


class Members:
    """Members that train side by side as one batch: optimizer and schedule as `inner.loop.Inner` has them."""

    def __init__(self, spec: RunSpec, count: int) -> None:
        self._spec, self.count = spec, count
        self.module = Decoder(spec.model)
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}
        """AdamW's, `[M, …]`, by name."""
        self.momenta: dict[str, Tensor] = {}
        """Muon's, `[M, …]`, by name."""
        self._losses = vmap(grad(self._loss), in_dims=(0, 0))

    def train(self, theta: Mapping[str, Tensor], batches: Iterable[Tensor], first: int) -> dict[str, Tensor]:
        """Weights `[M, …]` after steps from `theta` on windows `[M, B, T + 1]`."""
        inner = self._spec.inner
        local = {name: value.expand(self.count, *value.shape).clone() for name, value in theta.items()}
        for step, windows_MBT1 in enumerate(batches, first):
            with sdpa_kernel(SDPBackend.MATH):  # the others have no batching rule
                gradients = self._losses(local, windows_MBT1)
            norm_M = torch.stack([each.flatten(1).norm(dim=1) for each in gradients.values()]).norm(dim=0)
            scale_M = (inner.clip / (norm_M + 1e-6)).clamp(max=1.0)
            rate = learning_rate(inner, step)
            for name, gradient in gradients.items():
                self._update(
                    name, local[name], gradient * scale_M.view(-1, *[1] * (gradient.dim() - 1)), rate, step
                )
        return local

    def others(self, count: int, moments: dict[str, tuple[Tensor, Tensor]]) -> "Members":
        """Other members of the same run, with these moments."""
        new = Members(self._spec, count)
        new.moments = moments
        return new

    def _update(self, name: str, value: Tensor, gradient: Tensor, rate: float, step: int) -> None:
        inner = self._spec.inner
        if is_orthogonalized(inner.optimizer, name):
            self._turn(name, value, gradient, rate * inner.muon_lr)
            return
        if name not in self.moments:
            self.moments[name] = torch.zeros_like(value), torch.zeros_like(value)
        first, second = self.moments[name]
        first.lerp_(gradient, 1 - inner.beta1)
        second.mul_(inner.beta2).addcmul_(gradient, gradient, value=1 - inner.beta2)
        if value.dim() > 2:
            value.mul_(1 - rate * inner.weight_decay)
        below = (second / (1 - inner.beta2 ** (step + 1))).sqrt_().add_(inner.eps)
        value.addcdiv_(first, below, value=-rate / (1 - inner.beta1 ** (step + 1)))

    def _turn(self, name: str, value: Tensor, gradient: Tensor, rate: float) -> None:
        inner = self._spec.inner
        momentum = self.momenta.setdefault(name, torch.zeros_like(value))
        for at in range(self.count):
            muon_step(
                value[at],
                momentum[at],
                gradient[at],
                rate=rate,
                beta=inner.muon_momentum,
                decay=inner.weight_decay,
            )

    def _loss(self, values: dict[str, Tensor], window_BT1: Tensor) -> Tensor:
        logits_BTV = functional_call(self.module, values, (window_BT1[:, :-1],))
        return functional.cross_entropy(logits_BTV.flatten(0, 1), window_BT1[:, 1:].flatten())


class Trial:
    """Honest members are the first slots, liars the last."""

    def __init__(
        self, case: Case, data: Dataset, spec: RunSpec | None = None, *, class_W: Ints | None = None
    ) -> None:
        """`spec`: another one than the case's; `class_W`: of each training window, for members that are unlike."""
        torch.set_num_threads(1)
        self.case, self.spec = case, spec or spec_of(case)
        self._data = data
        self._arena = arena_of(self.spec.model)
        theta = {name: torch.from_numpy(value) for name, value in genesis(self.spec.model, self.spec.seed).items()}
        self.theta_C4096 = bridge.gather(theta, self._arena)
        self._named = {name: torch.empty(value.shape) for name, value in theta.items()}
        self._padding = padding_of(self._arena)
        trained = MEMBERS if case.attack is None or case.attack in WORKING else MEMBERS - case.liars
        self.slots = list(range(trained))
        """Places in the run's data of those that train."""
        self._members = Members(self.spec, trained)
        self._residual_MC4096 = torch.zeros((trained, *self.theta_C4096.shape))
        self._noise = torch.Generator().manual_seed(case.seed)
        self._first_C4096: Tensor | None = None
        self._codec = codec_of(self.spec.compress.codec, self.spec.compress.k)
        self._dealt_MW: Ints | None = None
        if case.dirichlet is not None:
            assert class_W is not None, "unlike members need classes"
            mixture_MK = mixtures(case.dirichlet, class_W, MEMBERS, case.seed)
            each = min(ROUNDS * STEPS * BATCH, len(class_W) // MEMBERS)
            self._dealt_MW = dealt(mixture_MK, class_W, each, case.seed)

    def loss(self, rounds: int = ROUNDS) -> float:
        """Train some rounds; bits per byte on the validation text, mean over the last of them."""
        losses = []
        for number in range(rounds):
            self.round(number)
            if number >= rounds - LAST:
                losses.append(self._validation())
        return float(np.mean(losses))

    def round(self, number: int) -> None:
        """One round."""
        sent = self._train(number)
        liars = self.case.liars if self.case.attack else 0
        honest = sent[: MEMBERS - liars]
        payloads = [*honest, *(self._lies(number, honest, sent) if liars else [])]
        self.theta_C4096 = clear(self._folded(self.theta_C4096, number, payloads), self._padding)

    def seen(self, number: int, honest: list[bytes], sent: list[bytes]) -> Seen:
        """What liars know of a round in which the members that train made `sent`, the honest ones first."""
        tables = torch.stack([self._values(payload) for payload in honest])
        if self._first_C4096 is None:
            self._first_C4096 = tables[0]
        own = [self._values(payload) for payload in sent[len(honest) :]]
        own_LC4096 = torch.stack(own) if own else torch.zeros((self.case.liars, *tables.shape[1:]))
        still = torch.zeros_like(self.theta_C4096)

        def fold(lies_LC4096: Tensor) -> Tensor:
            return to_float(self._folded(still, number, [*honest, *self._encoded(lies_LC4096)]))

        plain = to_float(self._folded(still, number, honest, judged=False))
        return Seen(number, tables, own_LC4096, self._first_C4096, self._noise, honest_step_C4096=plain, fold=fold)

    def _folded(self, theta: Tensor, number: int, payloads: list[bytes], *, judged: bool = True) -> Tensor:
        """θ + U of these payloads, with the case's rule or without."""
        entries = [digest(bytes([number, slot])) for slot in range(len(payloads))]
        plain = self.case.rule == "mean" or not judged
        return self._codec.apply_update(
            theta,
            [WEIGHT_UNIT] * len(payloads),
            payloads,
            OuterStep(self.spec.outer.alpha_256, self.spec.outer.floor_256),
            judge=None if plain else aggregation_of(self.spec, number, entries),
        )

    def _train(self, number: int) -> list[bytes]:
        """Payload of each member that trains."""
        anchor_C4096, count = to_float(self.theta_C4096), self._members.count
        bridge.write_rows(self._named, self._arena, 0, anchor_C4096)
        batches = (self._batch(number, step) for step in range(self.spec.steps(number)))
        local = self._members.train(self._named, batches, self.spec.steps_before(number))
        payloads = []
        for slot in range(count):
            mine_C4096 = bridge.gather({name: value[slot] for name, value in local.items()}, self._arena)
            residual = self._residual_MC4096[slot]
            payloads.append(self._codec.encode(residual, anchor_C4096, mine_C4096, self.spec.compress.feedback))
        return payloads

    def _batch(self, number: int, step: int) -> Tensor:
        """Windows `[M, B, T + 1]`."""
        found = []
        for slot in self.slots:
            tokens = self._data.batch(self._windows(number, step, slot))
            if self.case.attack == "label flip" and slot >= MEMBERS - self.case.liars:
                tokens = (tokens + 13) % self.spec.model.vocab
            found.append(torch.from_numpy(tokens))
        return torch.stack(found)

    def _windows(self, number: int, step: int, slot: int) -> Ints:
        if self._dealt_MW is None:
            place = WindowPlace(self.spec.seed, number * STEPS, slot, MEMBERS, BATCH)
            return windows(place, step, self._data.num_windows)
        at = (number * STEPS + step) * BATCH + np.arange(BATCH)
        found: Ints = self._dealt_MW[slot, at % self._dealt_MW.shape[1]]
        return found

    def _lies(self, number: int, honest: list[bytes], sent: list[bytes]) -> list[bytes]:
        assert self.case.attack is not None
        return self._encoded(ALL[self.case.attack](self.seen(number, honest, sent)))

    def _encoded(self, lies_LC4096: Tensor) -> list[bytes]:
        """Legal payloads of these values: the codec takes its k of each chunk, as it does of honest work."""
        nothing = torch.zeros_like(lies_LC4096[0])
        return [bytes(self._codec.encode(lie.clone(), nothing, nothing, 1.0)) for lie in lies_LC4096]

    def _values(self, payload: bytes) -> Tensor:
        index, q = decode(payload, self._codec.layout(self._arena.chunks))
        return torch.zeros(self.theta_C4096.shape).scatter_(1, index, q.float() * 2.0**-VALUE_BITS)

    def _validation(self) -> float:
        bridge.write_rows(self._named, self._arena, 0, to_float(self.theta_C4096))
        module = self._members.module
        module.load_state_dict(self._named)
        val_WT1 = self._data.validation(EVALUATED)
        return evaluate(module, loss_of, val_WT1, self._data.validation_bytes(EVALUATED)).val_bpb
