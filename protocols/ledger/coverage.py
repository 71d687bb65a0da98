"""Covers: the chunks that a round, or one contribution, exchanges. A round has the whole arena or one fragment.

With P fragments, round r exchanges fragment r mod P, so that each fragment is exchanged every P rounds
(Streaming DiLoCo, arXiv 2501.18512 §2.2). Embeddings, the output head and all vectors are fragment 0; the
layers go to the others in strided order (§3.3.1: a fragment then holds early and late layers), equally many to
each. The matrices of the last layers, where they do not divide, are shared out so that payloads are about equal:
each, the largest first, goes to the fragment that has fewest bytes.

If members train some of the experts only (`outer.holders`), a contribution covers fewer chunks: those of the round
that all members train, and those of the experts that it names (protocols/run/experts.py).
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from heapq import heapreplace

from atoll.protocols.run.arena import Arena, Placement, Span, arena_of
from atoll.protocols.run.experts import experts_in
from atoll.protocols.run.model_spec import ModelSpec, expert_of
from atoll.protocols.run.payload import payload_bytes
from atoll.protocols.run.run_spec import RunSpec
from atoll.protocols.run.sized_payload import sized_layout

Cover = tuple[Span, ...]
"""Spans in rising order that neither overlap nor touch. A payload holds the rows of its cover in this order."""


def size_of(cover: Cover) -> int:
    """Number of chunks in a cover."""
    return sum(span.chunks for span in cover)


def rest_of(cover: Cover, chunks: int) -> Cover:
    """The cover of all other chunks of an arena of `chunks` chunks."""
    starts = (0, *(span.stop for span in cover))
    stops = (*(span.start for span in cover), chunks)
    return tuple(Span(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop)


def shared_by(one: Cover, other: Cover) -> Cover:
    """The cover of the chunks that two covers share."""
    found: list[Span] = []
    a, b = 0, 0
    while a < len(one) and b < len(other):
        start, stop = max(one[a].start, other[b].start), min(one[a].stop, other[b].stop)
        if start < stop:
            found.append(Span(start, stop))
        a, b = (a + 1, b) if one[a].stop == stop else (a, b + 1)
    return tuple(found)


def slabs(cover: Cover, most: int) -> Iterator[tuple[int, Span]]:
    """The cover in spans of at most `most` chunks, each with its first row among the rows of the cover."""
    at = 0
    for span in cover:
        for start in range(span.start, span.stop, most):
            stop = min(start + most, span.stop)
            yield at, Span(start, stop)
            at += stop - start


def cut_in(cover: Cover, most: int) -> Iterator[tuple[int, Cover]]:
    """The cover in covers of `most` chunks, the last one of fewer, each with its first row among its rows."""
    at, room, part = 0, most, list[Span]()
    for span in cover:
        start = span.start
        while start < span.stop:
            stop = min(start + room, span.stop)
            part.append(Span(start, stop))
            room, start = room - (stop - start), stop
            if not room:
                yield at, tuple(part)
                at, room, part = at + most, most, []
    if part:
        yield at, tuple(part)


@lru_cache(maxsize=32)
def fragments(model: ModelSpec, count: int) -> tuple[Cover, ...]:
    """The covers of `count` fragments: together the whole arena, no chunk twice. Pure."""
    owned: list[list[Span]] = [[] for _ in range(count)]
    homes = _homes(model, count)
    for place, span in _spans(arena_of(model)):
        owned[homes.get(place.name, 0) if place else 0].append(span)
    return tuple(_joined(spans) for spans in owned)


@lru_cache(maxsize=64)
def trained_cover(model: ModelSpec, experts: bytes) -> Cover:
    """Chunks that a member trains: all but those of experts missing in the bitmap; empty bitmap: all chunks. Pure.

    Atoms of experts are matrices, so that no chunk belongs to two experts.
    """
    arena = arena_of(model)
    if not experts or not model.expert_count:
        return (Span(0, arena.chunks),)
    ours = {None, *experts_in(experts, model.expert_count)}
    return _joined([span for place, span in _spans(arena) if (place and expert_of(place.name)) in ours])


@lru_cache(maxsize=256)
def _cover(model: ModelSpec, count: int, fragment: int, experts: bytes) -> Cover:
    whole = fragments(model, count)[fragment]
    return shared_by(whole, trained_cover(model, experts)) if experts else whole


def cover_of(spec: RunSpec, number: int, experts: bytes = b"") -> Cover:
    """The cover of a contribution to round `number` that names these experts; empty: the whole round."""
    count = spec.outer.fragments
    return _cover(spec.model, count, number % count, experts)


def payload_size(spec: RunSpec, number: int, experts: bytes = b"") -> int:
    """The only legal size, in bytes, of the payload of such a contribution; a node requests no more than that.

    With `compress.sizes` it is the largest of several. This runs for each contribution that a peer writes, so a
    bitmap that was never seen must be cheap.
    """
    return _payload_size(spec, number, experts, spec.compress.k_of(number))


def _payload_size(spec: RunSpec, number: int, experts: bytes, k: int) -> int:
    if spec.compress.sizes:
        return sized_layout(spec, number).most_bytes
    count = spec.outer.fragments
    common, *each = _sizes(spec.model, count)[number % count]
    chunks = common + sum(each[expert] for expert in experts_in(experts, len(each)))
    return payload_bytes(spec.compress.codec, chunks, k)


def largest_payload(spec: RunSpec, experts: bytes = b"") -> int:
    """Size in bytes of the largest payload that covers these experts; empty: of any payload of the run."""
    return max(
        _payload_size(spec, number, experts, spec.compress.most_k) for number in range(spec.outer.fragments)
    )


def exchange_bytes(spec: RunSpec, experts: bytes = b"") -> int:
    """Bytes that a member sends while the whole model is exchanged once, after a warm-up of k.

    `experts`: bitmap of the experts that the payloads cover; empty: all.
    """
    return sum(_payload_size(spec, number, experts, spec.compress.k) for number in range(spec.outer.fragments))


@lru_cache(maxsize=32)
def _sizes(model: ModelSpec, count: int) -> tuple[tuple[int, ...], ...]:
    """Chunks of each fragment: those that all members train, then those of each expert."""
    experts = model.expert_count
    found = [[0] * (1 + experts) for _ in range(count)]
    homes = _homes(model, count)
    for place, span in _spans(arena_of(model)):
        expert = expert_of(place.name) if place else None
        at = homes.get(place.name, 0) if place else 0
        found[at][0 if expert is None else 1 + expert] += span.stop - span.start
    return tuple(map(tuple, found))


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


def _homes(model: ModelSpec, count: int) -> Mapping[str, int]:
    """The fragment of each matrix of a layer by name; what is not named is in fragment 0."""
    if count == 1:
        return {}
    whole = model.layers - model.layers % (count - 1)
    homes: dict[str, int] = {}
    rest: list[tuple[int, str]] = []
    for place, span in _spans(arena_of(model)):
        layer = _layer_of(place)
        if place is None or layer is None:
            continue
        if layer < whole:
            homes[place.name] = 1 + layer % (count - 1)
        else:
            rest.append((span.stop - span.start, place.name))
    return homes | _shared_out(rest, count)


def _shared_out(sizes: list[tuple[int, str]], count: int) -> dict[str, int]:
    """Each name, the largest first, with the fragment of 1 … count − 1 that has got least so far."""
    loads = [(0, fragment) for fragment in range(1, count)]
    homes: dict[str, int] = {}
    for chunks, name in sorted(sizes, key=lambda one: -one[0]):  # stable: the arena's order among equals
        load, homes[name] = loads[0]
        heapreplace(loads, (load + chunks, homes[name]))
    return homes


def _layer_of(place: Placement | None) -> int | None:
    if place is None or not place.name.startswith("model.layers."):
        return None
    return int(place.name.split(".")[2])


def _joined(spans: list[Span]) -> Cover:
    """Spans in rising order; those that touch become one."""
    cover: list[Span] = []
    for span in sorted(spans):
        if cover and cover[-1].stop == span.start:
            cover[-1] = Span(cover[-1].start, span.stop)
        else:
            cover.append(span)
    return tuple(cover)
