"""A small legal run, shared by the tests of the protocols."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from atoll.protocols.identity import Identity
from atoll.protocols.run.model_spec import ModelSpec
from atoll.protocols.run.run_spec import (
    SPEC_VERSION,
    CompressSpec,
    DataSpec,
    InnerSpec,
    OuterSpec,
    PaceSpec,
    RunSpec,
    Stage,
)

OWNER = Identity(bytes(range(32)))


@pytest.fixture(scope="session")
def owner() -> Identity:
    return OWNER


@pytest.fixture(scope="session")
def model() -> ModelSpec:
    return ModelSpec(
        dim=40, layers=2, heads=4, kv_heads=2, ffn=100, vocab=130, context=16,
        tied=False, rope_theta=10000.0, norm_eps=1e-5,
    )  # fmt: skip


@pytest.fixture(scope="session")
def spec(model: ModelSpec) -> RunSpec:
    return RunSpec(
        version=SPEC_VERSION,
        name="golden",
        owner=OWNER.peer_id,
        seed=7,
        model=model,
        data=DataSpec(source="builtin:shakespeare", tokenizer="bytes", digest=b""),
        inner=InnerSpec(
            lr=2e-3, lr_min=0.1, warmup_steps=10, total_steps=600, beta1=0.9, beta2=0.95,
            eps=1e-8, weight_decay=0.1, clip=1.0, batch=8,
        ),
        outer=OuterSpec(rounds=100, stages=(Stage(0, 5), Stage(10, 15)), alpha_256=256, floor_256=64),
        compress=CompressSpec(codec="sparse2", k=64, feedback=0.95),
        pace=PaceSpec(quorum_256=171, grace_256=64, lease_s=30.0, min_members=1),
    )  # fmt: skip


@pytest.fixture(scope="session")
def changed(spec: RunSpec) -> Callable[..., RunSpec]:
    """`changed("inner.lr", 1.0)`: the run with one key replaced."""

    def change(key: str, value: Any) -> RunSpec:
        head, _, tail = key.partition(".")
        if tail:
            value = msgspec.structs.replace(getattr(spec, head), **{tail: value})
        return msgspec.structs.replace(spec, **{head: value})

    return change
