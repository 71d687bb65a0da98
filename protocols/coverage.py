"""Which chunks a round exchanges: the whole arena, or one fragment of it at a time.

With P fragments, round r exchanges fragment r mod P, so that each fragment is exchanged every P rounds
(Streaming DiLoCo, arXiv 2501.18512 §2.2). Embeddings, the output head and all vectors are fragment 0; the
layers go to the others in strided order (§3.3.1: a fragment then holds early and late layers).
"""

from collections.abc import Iterator
from functools import lru_cache

from atoll.protocols.arena import Arena, Placement, arena_of
from atoll.protocols.model import ModelSpec
from atoll.protocols.payload import payload_bytes
from atoll.protocols.run import RunSpec
from atoll.protocols.spans import Span

Cover = tuple[Span, ...]
"""Rising, disjoint, not touching one another. A payload holds the rows of its cover in this order."""


def size_of(cover: Cover) -> int:
    """Chunks of a cover."""
    return sum(span.chunks for span in cover)


def rest_of(cover: Cover, chunks: int) -> Cover:
    """The other chunks of an arena of `chunks` chunks."""
    starts = (0, *(span.stop for span in cover))
    stops = (*(span.start for span in cover), chunks)
    return tuple(Span(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop)


def slabs(cover: Cover, most: int) -> Iterator[tuple[int, Span]]:
    """The cover in spans of at most `most` chunks, each with its first row among the rows of the cover."""
    at = 0
    for span in cover:
        for start in range(span.start, span.stop, most):
            stop = min(start + most, span.stop)
            yield at, Span(start, stop)
            at += stop - start


@lru_cache(maxsize=32)
def fragments(model: ModelSpec, count: int) -> tuple[Cover, ...]:
    """The covers of `count` fragments: together the whole arena, no chunk twice. Pure."""
    arena = arena_of(model)
    if count == 1:
        return ((Span(0, arena.chunks),),)
    owned: list[list[Span]] = [[] for _ in range(count)]
    for place, span in _spans(arena):
        owned[_fragment(place, count)].append(span)
    return tuple(_joined(spans) for spans in owned)


def cover_of(spec: RunSpec, number: int) -> Cover:
    """What the contributions to round `number` cover."""
    count = spec.outer.fragments
    return fragments(spec.model, count)[number % count]


def payload_size(spec: RunSpec, number: int) -> int:
    """The only legal length of a payload of round `number`: what a node may ask for before it saw a byte."""
    return payload_bytes(spec.compress.codec, size_of(cover_of(spec, number)), spec.compress.k)


def largest_payload(spec: RunSpec) -> int:
    """Bytes of the run's largest payload."""
    return max(payload_size(spec, number) for number in range(spec.outer.fragments))


def _spans(arena: Arena) -> Iterator[tuple[Placement | None, Span]]:
    """Each matrix with its chunks; the vector region, which has no one owner, last."""
    vectors = arena.chunks
    for place in arena.placements:
        if len(place.shape) == 2:
            rows, cols = place.blocks
            yield place, Span(place.first_chunk, place.first_chunk + rows * cols)
        else:
            vectors = min(vectors, place.first_chunk)
    if vectors < arena.chunks:
        yield None, Span(vectors, arena.chunks)


def _fragment(place: Placement | None, count: int) -> int:
    if place is None or not place.name.startswith("model.layers."):
        return 0
    layer = int(place.name.split(".")[2])
    return 1 + layer % (count - 1)


def _joined(spans: list[Span]) -> Cover:
    """Spans in rising order; those that touch become one."""
    cover: list[Span] = []
    for span in sorted(spans):
        if cover and cover[-1].stop == span.start:
            cover[-1] = Span(cover[-1].start, span.stop)
        else:
            cover.append(span)
    return tuple(cover)
