"""The arena: the values of every atom in chunks of 4096, laid end to end.

Master weights, pseudo-gradients and error feedback are all `[chunks, 4096]` arrays in this one order, so
compression and the fold never look at shapes.

- A matrix is cut into 64×64 blocks, row of blocks by row of blocks; its edges are padded with zeros
  (SparseLoCo, arXiv 2508.15706: 2-D tensors in 64×64 blocks).
- All vectors are laid end to end in one last region and cut into chunks of 4096, zeros at the end.
"""

from functools import lru_cache
from typing import Annotated, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from atoll.protocols.run.model_spec import ModelSpec, atoms

CHUNK = 4096
"""Values in one chunk."""
SIDE = 64
"""Rows and columns of the block of a matrix that fills one chunk."""


ChunkIndex: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 32)]


class Span(NamedTuple):
    """Neighbouring chunks `start … stop - 1` of an arena."""

    start: ChunkIndex
    stop: ChunkIndex

    @property
    def chunks(self) -> int:
        """Number of chunks in the span."""
        return self.stop - self.start

    def holds(self, chunk: int) -> bool:
        """Whether `chunk` lies in the span."""
        return self.start <= chunk < self.stop


class Placement(msgspec.Struct, frozen=True):
    """Place of one atom in the arena."""

    name: str
    shape: tuple[int, ...]
    first_chunk: int
    """First chunk of a matrix; for a vector, the first chunk of the vector region."""
    offset: int
    """Number of values before a vector inside the vector region; 0 for a matrix."""

    @property
    def blocks(self) -> tuple[int, int]:
        """Number of rows and of columns of 64×64 blocks in a matrix."""
        rows, cols = self.shape
        return -(-rows // SIDE), -(-cols // SIDE)


class Edge(msgspec.Struct, frozen=True):
    """A chunk with padding: value i is real if i // 64 < `rows` and i % 64 < `cols` and i < `values`."""

    chunk: int
    rows: int
    cols: int
    values: int


class Arena(msgspec.Struct, frozen=True):
    """Layout of all atoms of a model."""

    placements: tuple[Placement, ...]
    chunks: int
    values: int
    """Number of parameters; `chunks * 4096` includes the padding."""


@lru_cache(maxsize=32)
def arena_of(model: ModelSpec) -> Arena:
    """Layout of a model's atoms, a pure function of the RunSpec."""
    table = atoms(model)
    placed: list[Placement] = []
    chunk = 0
    for atom in table:
        if len(atom.shape) == 2:
            place = Placement(atom.name, atom.shape, chunk, 0)
            placed.append(place)
            chunk += place.blocks[0] * place.blocks[1]
    offset = 0
    for atom in table:
        if len(atom.shape) == 1:
            placed.append(Placement(atom.name, atom.shape, chunk, offset))
            offset += atom.shape[0]
    return Arena(tuple(placed), chunk - (-offset // CHUNK), model.parameters)


@lru_cache(maxsize=32)
def state_arena_of(model: ModelSpec, momenta: int, table: int = 0) -> Arena:
    """Layout of a state: the model's arena, then as many others of this shape, one for each momentum.

    The atoms of the first momentum are named `momentum1.ATOM`. `table`: numbers of a table of k behind all.
    """
    arena = arena_of(model)
    placed = list(arena.placements)
    for at in range(1, momenta + 1):
        placed += [
            Placement(f"momentum{at}.{one.name}", one.shape, one.first_chunk + at * arena.chunks, one.offset)
            for one in arena.placements
        ]
    chunks, values = (1 + momenta) * arena.chunks, (1 + momenta) * arena.values
    if table:
        placed.append(Placement("sizes", (table,), chunks, 0))
    return Arena(tuple(placed), chunks - (-table // CHUNK), values + table)


def edges(arena: Arena) -> tuple[Edge, ...]:
    """All chunks with padding, in rising order. Padding is zero in every state: no contribution may change it."""
    found: list[Edge] = []
    tail = 0
    for place in arena.placements:
        if len(place.shape) == 2:
            found += _matrix_edges(place)
        else:
            tail = (place.offset + place.shape[0]) % CHUNK
    if tail:
        found.append(Edge(arena.chunks - 1, SIDE, SIDE, tail))
    return tuple(found)


def _matrix_edges(place: Placement) -> list[Edge]:
    down, across = place.blocks
    rows = place.shape[0] - (down - 1) * SIDE
    cols = place.shape[1] - (across - 1) * SIDE
    found: list[Edge] = []
    for block in range(down * across):
        edge = Edge(
            place.first_chunk + block,
            rows if block // across == down - 1 else SIDE,
            cols if block % across == across - 1 else SIDE,
            CHUNK,
        )
        if edge.rows < SIDE or edge.cols < SIDE:
            found.append(edge)
    return found
