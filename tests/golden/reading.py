"""Reads the shipped sources and the types of messages."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from tests.test_layout import SOURCES, walked

ROOT = Path(__file__).resolve().parents[2]
Place = tuple[Any, ...]
reads_sources = pytest.mark.xdist_group("layout")
"""One process parses all sources."""


def nodes() -> Iterator[tuple[str, ast.AST]]:
    """Everything in the shipped sources, with the path of its module. Some cannot be imported into one process."""
    return ((path, node) for path, tree in SOURCES.items() for node in walked(tree))


@cache
def structs() -> frozenset[str]:
    """`path:Name` of every msgspec struct."""
    found: set[str] = set()
    names = {"msgspec.Struct", "Struct"}
    for path, node in nodes():
        if isinstance(node, ast.ClassDef) and names & {ast.unparse(base) for base in node.bases}:
            found.add(f"{path}:{node.name}")
            names.add(node.name)  # a base of what follows it
    return frozenset(found)


def path_of(kind: type) -> str:
    """`path:Name` of a class."""
    return f"{kind.__module__.removeprefix('atoll.').replace('.', '/')}.py:{kind.__name__}"


def parts(value: Any) -> Iterator[Any]:
    """`value` and everything inside it."""
    yield value
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.astuple(value)
    elif isinstance(value, dict):
        value = (*value, *value.values())
    if isinstance(value, tuple | list):
        for part in value:
            yield from parts(part)


def inside(info: inspect.Type, at: Place = ()) -> Iterator[tuple[Place, inspect.Type]]:
    """A type and the types inside it, each with the class and the field that hold it."""
    yield at, info
    match info:
        case inspect.StructType():
            for field in info.fields:
                yield from inside(field.type, (info.cls, field.name))
            return
        case inspect.UnionType():
            within = info.types
        case inspect.TupleType():
            within = info.item_types
        case inspect.NamedTupleType():
            within = tuple(field.type for field in info.fields)
        case inspect.DictType():
            within = (info.key_type, info.value_type)
        case inspect.VarTupleType() | inspect.ListType() | inspect.SetType() | inspect.FrozenSetType():
            within = (info.item_type,)
        case _:
            return
    for each in within:
        yield from inside(each, at)
