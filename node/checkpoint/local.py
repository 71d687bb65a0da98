"""A worker's state that a kill must not lose: weights, error feedback, Adam moments, unsent payloads.

The tensors and the body about them are one generation: both are of the same moment.
"""

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from atoll.node.checkpoint import generations
from atoll.node.checkpoint.manifests import MANIFEST_MAX_BYTES
from atoll.node.checkpoint.tensorfile import all_finite, read_atom, write_atom
from atoll.protocols import codec
from atoll.protocols.errors import CorruptFault, DecodeError
from atoll.protocols.ids import Digest, PeerId, RunId
from atoll.protocols.local.worker_messages import Pending
from atoll.protocols.run.arena import CHUNK, Placement, Span, arena_of
from atoll.protocols.run.model_spec import expert_of
from atoll.protocols.run.run_spec import RunSpec


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


class FirstBody(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Body of a local state as versions before `author` wrote it. Still read."""

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


class LocalBody(FirstBody, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Body of a local state: everything but the tensors."""

    author: PeerId = PeerId("")
    """The node that saved it, or that it was restored for; empty: an older version."""


FINAL = "final"
"""Of Θ_final."""
AVERAGE = "average"
"""Of the average of final states, where the node keeps one."""
LOCAL = "local/"
"""Of the local weights: `local/ATOM`."""
ANCHOR, ANCHOR_ROWS = "anchor/values", "anchor/rows"
"""Their anchor, of the chunks where it is not equal to them."""
WHOLE_ANCHOR = "anchor"
"""The anchor of all chunks, as earlier versions saved it."""

SAVED = (LOCAL, WHOLE_ANCHOR)
"""How the names of local weights and anchor begin."""


class LocalState(NamedTuple):
    """A local state as it was loaded."""

    body: LocalBody
    tensors: dict[str, Tensor]
    report: tuple[str, ...]
    """Empty, or one line for each newer save that did not verify."""
    arrays: dict[str, Path]
    """See `generations.Loaded`."""


def saved_anchor(tensors: Mapping[str, Tensor], place: Placement) -> Tensor:
    """The anchor of an atom whose local weights are saved."""
    if WHOLE_ANCHOR in tensors:
        return read_atom(tensors[WHOLE_ANCHOR], place)
    is_matrix = len(place.shape) == 2
    chunks = math.prod(place.blocks) if is_matrix else -(-(place.offset + place.shape[0]) // CHUNK)
    values_N4096, own = torch.zeros((chunks, CHUNK)), msgspec.structs.replace(place, first_chunk=0)
    write_atom(values_N4096, own, tensors[LOCAL + place.name])
    at = tensors[ANCHOR_ROWS] - place.first_chunk
    inside = (at >= 0) & (at < chunks)
    values_N4096[at[inside]] = tensors[ANCHOR][inside]
    return read_atom(values_N4096, own)


def check_saved(tensors: Mapping[str, Tensor], spec: RunSpec) -> None:
    """Raise CorruptFault unless local weights and anchor can be loaded, where the experts among them are trained.

    Tensors without local weights pass.
    """
    arena = arena_of(spec.model)
    saved = {LOCAL + place.name: place.shape for place in arena.placements}
    if not any(name.startswith(SAVED) for name in tensors):
        return
    shapes = {name: shape for name, shape in saved.items() if name in tensors or expert_of(name) is None}
    if WHOLE_ANCHOR in tensors:
        shapes[WHOLE_ANCHOR] = (arena.chunks, CHUNK)
    else:
        rows = tensors.get(ANCHOR_ROWS, torch.tensor([-1]))
        if rows.dim() != 1 or rows.dtype != torch.int64 or bool(((rows < 0) | (rows >= arena.chunks)).any()):
            raise CorruptFault("the saved rows of the anchor are missing, or not those of this model")
        shapes[ANCHOR] = (len(rows), CHUNK)
    for name, shape in shapes.items():
        found = tensors.get(name)
        if found is None or found.shape != shape or not all_finite(found):
            raise CorruptFault(f"the saved {name} is missing, of another shape or not finite")


def begin_local(
    folder: Path,
    body: LocalBody,
    tensors: Mapping[str, Tensor],
    steady: Collection[str] = (),
    arrays: Mapping[str, generations.SavedArray] | None = None,
    moments: generations.Rare = generations.NO_RARE,
    moments_are_saved: bool = False,
) -> generations.Unfinished:
    """Write; saved whole or not at all by `finish`, until which `steady` may not change.

    The save before is kept. `arrays`, and the moments, which are rare: see generations.begin. Raises DiskFault.
    """
    return generations.begin(folder, tensors, codec.encode(body), steady, arrays, moments, moments_are_saved)


def body_of(data: bytes) -> LocalBody:
    """The body that a generation has. Raises DecodeError."""
    try:
        return codec.decode(data, LocalBody, max_bytes=MANIFEST_MAX_BYTES)
    except DecodeError:
        first = codec.decode(data, FirstBody, max_bytes=MANIFEST_MAX_BYTES)
    return LocalBody(**{name: getattr(first, name) for name in FirstBody.__struct_fields__})


def load_local(folder: Path, run: RunId, check: generations.Check = lambda _: None) -> LocalState | None:
    """The newest save that verifies; None if there is none. `check`: see generations.load.

    Raises CorruptFault, DiskFault.
    """
    loaded = generations.load(folder, check)
    if loaded is None:
        return None
    try:
        body = body_of(loaded.body)
    except DecodeError as error:
        raise CorruptFault(f"{folder}: {error}", hint="another version wrote it; use that one") from error
    if body.run != run:
        raise CorruptFault(f"{folder}: holds the state of another run", hint="choose another home")
    return LocalState(body, loaded.tensors, loaded.report, loaded.arrays)
