"""Every key of `config.toml`: its type, default and meaning, read from the source of NodeConfig and LimitsConfig.

The docstrings under the fields are all that describes a key: `atoll config list` and docs/config.md print them.
"""

import ast
import difflib
import inspect
import types
from collections.abc import Iterator
from textwrap import dedent
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from atoll.node.config.node_config import NodeConfig
from atoll.protocols.errors import ConfigError

_NAMES: dict[Any, str] = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "`true`, `false`",
    type(None): "absent",
}


class ConfigKey(msgspec.Struct, frozen=True):
    """One key of `config.toml`."""

    name: str
    """With its table: `port`, `limits.up`."""
    kind: str
    """Legal values, in words."""
    default: Any
    """As TOML has it; None: the key is absent."""
    meaning: str
    """One paragraph."""
    takes_text_only: bool
    """Whether every legal value is a string."""
    takes_list: bool
    """Whether every legal value is a list."""


def config_keys() -> list[ConfigKey]:
    """All keys, in the order of NodeConfig; those of a table stand in its place."""
    return list(_keys_of(NodeConfig, ""))


def key_named(name: str) -> ConfigKey:
    """The key `name`. Raises ConfigError, with the likely spelling."""
    known = {key.name: key for key in config_keys()}
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else "`atoll config list` has them all"
    raise ConfigError(f"there is no key {name!r}", hint=hint)


def _keys_of(kind: type[msgspec.Struct], table: str) -> Iterator[ConfigKey]:
    meanings, hints = _meanings(kind), get_type_hints(kind, include_extras=True)
    for field in msgspec.structs.fields(kind):
        hint = hints[field.name]
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            yield from _keys_of(hint, f"{table}{field.encode_name}.")
            continue
        default = msgspec.to_builtins(field.default if field.default_factory is msgspec.NODEFAULT else [])
        yield ConfigKey(
            name=table + field.encode_name,
            kind=_words(hint),
            default=list(default) if isinstance(default, tuple) else default,
            meaning=meanings[field.name],
            takes_text_only=_is_text(hint),
            takes_list=get_origin(hint) in (tuple, list),
        )


def _meanings(kind: type) -> dict[str, str]:
    """The docstring under each field of a class, as one paragraph."""
    (body,) = ast.parse(dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            found[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return found


def _is_text(hint: Any) -> bool:
    return hint is str or (get_origin(hint) is Literal and all(isinstance(one, str) for one in get_args(hint)))


def _words(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return ", ".join(f'`"{one}"`' if isinstance(one, str) else f"`{one}`" for one in inner)
    if origin in (Union, types.UnionType):
        return ", ".join(map(_words, inner))
    if origin is Annotated:
        return _words(inner[0])
    if origin in (tuple, list):
        return f"list of {_words(inner[0])}"
    return _NAMES.get(hint, "table")
