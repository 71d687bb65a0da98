"""A small arena, payloads as the network carries them, and a fold over them."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from atoll.node.learning.outer.fixed import plus, to_fixed
from atoll.node.learning.outer.fold import Fold, RoundSet, Shrunk, round_set
from atoll.protocols.ids import digest, peer_id_of
from atoll.protocols.ledger.coverage import Cover
from atoll.protocols.local.worker_messages import Member
from atoll.protocols.run.arena import Arena, Span, arena_of
from atoll.protocols.run.model_spec import ModelSpec
from tests.plain.mean import outer_update
from tests.plain.sparse2 import decode, encode

torch.set_num_threads(1)
K = 64
MODEL = ModelSpec(
    dim=40, layers=1, heads=4, kv_heads=2, ffn=100, vocab=70, context=16,
    tied=True, rope_theta=10000.0, norm_eps=1e-5,
)  # fmt: skip


def pattern(chunks: int, salt: int) -> torch.Tensor:
    """Values that no random generator's version can change."""
    at = torch.arange(chunks * 4096, dtype=torch.int64).view(chunks, 4096) + 977 * salt
    mixed = (at * 2654435761 + salt * 40503) % 4294967296
    mixed = (mixed ^ (mixed >> 13)) * 1274126177 % 4294967296
    return ((mixed % 65536) - 32768).float() / 32768


def member(source: str, weight: int = 64) -> Member:
    name = digest(source.encode())
    return Member(name, peer_id_of(bytes(32)), weight, name, source)


class DirectFold:
    """A fold that is given members, and whose work and commit are one call."""

    def __init__(self, *args: Any, **more: Any) -> None:
        self.fold = Fold(*args, **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fold, name)

    @property
    def open_rounds(self) -> tuple[int, ...]:
        return tuple(sorted(self.fold._open))

    def set_round(self, number: int, members: Sequence[Member]) -> None:
        self.fold.prepare_round(round_set(number, members))()

    def check(self, number: int, members: Sequence[Member], shrunk: Sequence[Shrunk] = ()) -> bytes:
        return self.fold.check(round_set(number, members), shrunk)

    def finalize(self, number: int, members: Sequence[Member], shrunk: Sequence[Shrunk] = ()) -> bytes:
        return self.fold.prepare_final(round_set(number, members), shrunk)()


class World:
    """Payloads by name, and folds that read them."""

    def __init__(self, model: ModelSpec = MODEL) -> None:
        self.arena: Arena = arena_of(model)
        self.theta = to_fixed(pattern(self.arena.chunks, 99) * 0.05)
        self.mean = partial(outer_update, alpha_256=200, floor_256=64)
        self.cover: Cover = (Span(0, self.arena.chunks),)
        self.payloads: dict[str, bytes] = {}

    def part(self, salt: int, weight: int = 64) -> Member:
        source = f"payload-{salt}"
        if source not in self.payloads:
            self.payloads[source] = encode(pattern(self.arena.chunks, salt) ** 5 * 0.01, K)
        return member(source, weight)

    def load(self, source: str) -> tuple[torch.Tensor, torch.Tensor]:
        return decode(self.payloads[source], self.arena.chunks, K)

    def update(self, members: Sequence[Member], chunks: int) -> torch.Tensor:
        return self.mean([(one.weight, *self.load(one.path)) for one in members], chunks)

    def onto(self, fresh: RoundSet, theta_N4096: torch.Tensor) -> torch.Tensor:
        return plus(theta_N4096, self.update(fresh.members, len(theta_N4096)))

    def fold(self, **more: Any) -> "DirectFold":
        return DirectFold(self.theta, self.arena, self.onto, lambda _: self.cover, **more)


@pytest.fixture(scope="session")
def world() -> World:
    return World()


@pytest.fixture(scope="session")
def flat_arena() -> Arena:
    return replace(arena_of(MODEL), placements=())
