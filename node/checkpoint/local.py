"""A worker's state that a kill must not lose: weights, error feedback, Adam moments, unsent payloads.

The tensors and the body about them are one generation: both are of the same moment.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
from torch import Tensor

from atoll.node.checkpoint import generations
from atoll.node.checkpoint.parts import WriteParts
from atoll.protocols import codec
from atoll.protocols.errors import CorruptFault, DecodeError
from atoll.protocols.ids import Digest, RunId
from atoll.protocols.local.worker_messages import Pending
from atoll.protocols.run.arena import Span


class KeptBody(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Our newest Reduction: what its slice's second compression left out is saved."""

    round: int
    payload: Digest
    span: Span


class PastPayload(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A payload of ours whose round is final: where this node leaves its chain, it is pending again."""

    sent: Pending
    rows: tuple[Span, ...]
    """Rows of the payload that are in the final set; the others went back to the error feedback."""


class LocalBody(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Body of a local state: everything but the tensors."""

    run: RunId
    final: int
    """Round of the saved Θ_final; -1 is genesis."""
    state: Digest
    """State digest of the saved Θ_final."""
    steps: int
    """Inner steps that this node took: Adam's bias correction and the data position."""
    pending: tuple[Pending, ...]
    sent: int = -1
    """Round whose work the saved local weights have in flight; −1: none, or they are not saved."""
    sent_experts: bytes = b""
    """Bitmap of the experts that this work covers."""
    kept: tuple[KeptBody, ...] = ()
    """Whose error feedback the tensor `kept` is; empty where this node reduces nothing."""
    past: tuple[PastPayload, ...] = ()
    """Our newest payloads of final rounds, by rising round."""
    newest: int = -1
    """Newest round that this state knows to be final, sent or recognised, also in a chain that the node left."""
    settled: int = -1
    """Our work up to this round is accounted for, even if `final` is older: the node left its chain after it."""
    left: tuple[Digest, ...] = ()
    """Our payloads that a chain counted which the node left: a share of them returns; in order."""


class LocalState(NamedTuple):
    """A local state as it was loaded."""

    body: LocalBody
    tensors: dict[str, Tensor]
    report: tuple[str, ...]
    """Empty, or one line for each newer save that did not verify."""


def begin_local(
    folder: Path,
    body: LocalBody,
    tensors: Mapping[str, Tensor],
    steady: Collection[str] = (),
    parts: WriteParts | None = None,
) -> generations.Unfinished:
    """Write; saved whole or not at all by `finish`, until which `steady` may not change.

    The save before is kept. `parts`: see generations.begin. Raises DiskFault.
    """
    return generations.begin(folder, tensors, codec.encode(body), steady, parts)


def load_local(folder: Path, run: RunId, check: generations.Check = lambda _: None) -> LocalState | None:
    """The newest save that verifies; None if there is none. `check`: see generations.load.

    Raises CorruptFault, DiskFault.
    """
    loaded = generations.load(folder, check)
    if loaded is None:
        return None
    try:
        body = codec.decode(loaded.body, LocalBody, max_bytes=generations.MANIFEST_MAX_BYTES)
    except DecodeError as error:
        raise CorruptFault(f"{folder}: {error}", hint="another version wrote it; use that one") from error
    if body.run != run:
        raise CorruptFault(f"{folder}: holds the state of another run", hint="choose another home")
    return LocalState(body, loaded.tensors, loaded.report)
