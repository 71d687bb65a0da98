"""Reads and writes the weights of a Hugging Face folder: `model.safetensors`, or shards of it with an index.

A run's weights are int32 in units of 2⁻²⁴. They are written as float32 (exact below 1), and read from float32,
bfloat16 or float16. Names, shapes and sizes of a file are checked before a tensor is read.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from atoll.node.import_export.huggingface.config import model_type_of
from atoll.node.import_export.huggingface.ffn_slices import dense_of, joined
from atoll.p2p.system.atomic_files import write_whole
from atoll.protocols.errors import ConfigError, DiskFault, Divergence
from atoll.protocols.run.model_spec import Atom, ModelSpec, atoms

UNIT = 1 << 24
SHARD_BYTES = 2 << 30
INDEX, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
JSON_MAX_BYTES = 64 << 20
PUBLIC = 0o666
"""Mode of files that others may read, as far as the user's umask lets them."""
_DTYPES = ("F32", "BF16", "F16")
_MIXTRAL_NAMES = (
    (".mlp.", ".block_sparse_moe."),
    (".gate_proj.", ".w1."),
    (".up_proj.", ".w3."),
    (".down_proj.", ".w2."),
)
"""Parts of our atoms' names, and what Mixtral's checkpoints have in their place."""
KEY_BIAS = ".k_proj.bias"
_WHOLE_BITS = 7
"""Weights of a run are below 2⁷."""
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def save_weights(
    folder: Path, model: ModelSpec, read: Callable[[str], Tensor], shard_bytes: int = SHARD_BYTES
) -> None:
    """Write all atoms, with at most one shard in memory; `read` gives an atom as int32. Raises DiskFault."""
    read, model = joined(model, read), dense_of(model)
    shards, called = _shards(atoms(model), shard_bytes), tensor_names(model)
    names = [_shard_name(at, len(shards)) for at in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        tensors = {called[atom.name]: published(model, atom.name, read(atom.name)) for atom in shard}
        save_tensors(folder / name, tensors)
    if len(shards) > 1:
        table = {called[atom.name]: name for name, shard in zip(names, shards, strict=True) for atom in shard}
        index = {"metadata": {"total_size": 4 * model.parameters}, "weight_map": table}
        write_whole(folder / INDEX, f"{json.dumps(index, indent=2)}\n".encode(), mode=PUBLIC)


class LoadedWeights(NamedTuple):
    """The weights of a checkpoint as a run has them."""

    theta: dict[str, Tensor]
    keys_halved: bool
    """Whether keys were halved and queries doubled: adapters of these do not fit the checkpoint itself."""


def load_weights(
    folder: Path, model: ModelSpec, report: Callable[[int, int], None] = lambda done, of: None
) -> LoadedWeights:
    """All atoms as int32 in units of 2⁻²⁴, rounded half to even, in the agreed order.

    `report` is told how many of how many tensors are read. Raises ConfigError for missing, extra or mis-shaped
    atoms, Divergence for a value that is not within ±128.
    """
    called = tensor_names(model)
    wanted = {called[atom.name]: atom.shape for atom in atoms(model)}
    found: dict[str, Tensor] = {}
    large: dict[str, int] = {}
    for path in _files(folder):
        for name, value in _load(path, wanted, model.tied):
            if name in found:
                raise ConfigError(f"{path}: {name} is in another file too")
            halvings = _halvings(value) if name.endswith(KEY_BIAS) else 0
            if halvings:
                large[name.removesuffix(KEY_BIAS)] = halvings
            if gain := _added_gain(model, name):
                value = value.double() + gain / UNIT
            found[name] = to_fixed(value.double() / (1 << halvings) if halvings else value, name)
            report(len(found), len(wanted))
    for name in wanted.keys() - found.keys():
        raise ConfigError(f"{folder}: the checkpoint lacks {name}")
    if model.tied and _HEAD in found and not torch.equal(found.pop(_HEAD), found[_EMBEDDING]):
        raise ConfigError(f"{folder}: {_HEAD} is not the embedding, but the config says that they are tied")
    for at, halvings in large.items():
        _halve_keys(found, at, halvings)
    return LoadedWeights({ours: found[theirs] for ours, theirs in called.items()}, bool(large))


def tensor_names(model: ModelSpec) -> dict[str, str]:
    """Atom names -> tensor names, in the agreed order. Raises ConfigError for a model without a class."""
    renames = _MIXTRAL_NAMES if model_type_of(model) == "mixtral" else ()
    found = {atom.name: atom.name for atom in atoms(model)}
    for ours, theirs in renames:
        found = {name: called.replace(ours, theirs) for name, called in found.items()}
    return found


def to_fixed(values: Tensor, name: str) -> Tensor:
    """Floats as int32 in units of 2⁻²⁴, rounded half to even. Raises Divergence outside ±128 and for NaN."""
    scaled = (values.double() * UNIT).round()
    if not bool(((scaled >= -(2**31)) & (scaled < 2**31)).all()):
        raise Divergence(f"{name} has a value that is NaN or outside -128 … 128")
    return scaled.to(torch.int32)


def published(model: ModelSpec, name: str, atom: Tensor) -> Tensor:
    """The values of an atom, int32, as a file or a model of transformers has them, float32."""
    return (atom - _added_gain(model, name)).to(torch.float32) / UNIT


def _added_gain(model: ModelSpec, name: str) -> int:
    """What a run's gains have above the file's, in units of 2⁻²⁴: Gemma's norms multiply by 1 + weight."""
    return UNIT if model.gemma and name.endswith("norm.weight") else 0


def _halvings(bias: Tensor) -> int:
    """How often the biases of keys must be halved to be below 128; 0 where they fit. NaN is refused later."""
    largest = float(bias.abs().max())
    return max(0, math.frexp(largest)[1] - _WHOLE_BITS) if math.isfinite(largest) else 0


def _halve_keys(found: dict[str, Tensor], at: str, halvings: int) -> None:
    """Halve a layer's keys, and double its queries as often: their products, which alone count, stay the same.

    Published Qwen2 models have biases of keys above 128, which the weights of a run cannot be. The bias is halved
    already. Raises Divergence if a query is then too large.
    """
    keys = found[f"{at}.k_proj.weight"]
    found[f"{at}.k_proj.weight"] = to_fixed(keys.double() / UNIT / (1 << halvings), f"{at}.k_proj.weight")
    for name in (f"{at}.q_proj.weight", f"{at}.q_proj.bias"):
        found[name] = to_fixed(found[name].double() / UNIT * (1 << halvings), name)


def read_json(path: Path, max_bytes: int = JSON_MAX_BYTES) -> dict[str, Any]:
    """The JSON object of an untrusted file. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise ConfigError(f"{path} has more than {max_bytes >> 20} MiB")
        value = json.loads(data)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return value


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write one safetensors file to the disk. Raises DiskFault."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
        with path.open("rb") as file:
            os.fsync(file.fileno())
    except (OSError, SafetensorError) as error:
        raise DiskFault(f"{path}: {error}", hint="nothing was exported") from error


def _shards(table: Iterable[Atom], limit_bytes: int) -> list[list[Atom]]:
    found: list[list[Atom]] = [[]]
    size = 0
    for atom in table:
        more = 4 * math.prod(atom.shape)
        if found[-1] and size + more > limit_bytes:
            found.append([])
            size = 0
        found[-1].append(atom)
        size += more
    return found


def _shard_name(at: int, count: int) -> str:
    return SINGLE_FILE if count == 1 else f"model-{at + 1:05d}-of-{count:05d}.safetensors"


def _files(folder: Path) -> Iterator[Path]:
    if not (folder / INDEX).exists():
        yield folder / SINGLE_FILE
        return
    table = read_json(folder / INDEX).get("weight_map")
    names = list(table.values()) if isinstance(table, dict) else []
    for name in sorted({str(name): name for name in names}.values(), key=str):
        if not isinstance(name, str) or "/" in name or "\\" in name or not name.endswith(".safetensors"):
            raise ConfigError(f"{folder / INDEX}: {name!r} is not the name of a shard")
        yield folder / name


def _load(path: Path, wanted: dict[str, tuple[int, ...]], tied: bool) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                _check(path, name, file.get_slice(name), wanted, tied)
                yield name, file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} is not a safetensors file that can be read: {error}") from error


def _check(path: Path, name: str, found: Any, wanted: dict[str, tuple[int, ...]], tied: bool) -> None:
    shape = wanted[_EMBEDDING] if tied and name == _HEAD else wanted.get(name)
    if shape is None:
        raise ConfigError(f"{path}: {name} is no part of the model that config.json describes")
    if tuple(found.get_shape()) != shape:
        raise ConfigError(f"{path}: {name} has the shape {tuple(found.get_shape())}, not {shape}")
    if found.get_dtype() not in _DTYPES:
        raise ConfigError(f"{path}: {name} is {found.get_dtype()}, none of {', '.join(_DTYPES)}")
