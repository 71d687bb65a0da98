"""A LoRA run's weights for other programs: merged into the base's matrices, or as a folder that peft loads.

peft's files: `adapter_config.json` says where the factors belong, `adapter_model.safetensors` has them, named
`base_model.model.` and the module's path, A as `[r, in]` and B as `[out, r]`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from atoll.node.import_export.huggingface.ffn_slices import Read
from atoll.node.import_export.huggingface.folder import new_folder
from atoll.node.import_export.huggingface.weights import PUBLIC, UNIT, save_tensors, to_fixed
from atoll.p2p.system.atomic_files import write_whole
from atoll.protocols.run.lora import TARGETS, factors_of, is_target
from atoll.protocols.run.model_spec import ModelSpec, atoms

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


def merged_reader(model: ModelSpec, read: Read, read_base: Read) -> Read:
    """Reads atoms of `model.base` with the adapters in them, int32, one matrix at a time.

    `read` gives a factor as the run has it, a vector. Raises Divergence for a merged value outside ±128.
    """

    def read_merged(name: str) -> Tensor:
        weight_OI = read_base(name)
        if not is_target(name, model.lora_targets):
            return weight_OI
        first_RI, second_OR = _factors(model, read, name)
        # In float64: the one rounding is to the steps of 2⁻²⁴ that all weights have.
        moved_OI = model.lora_scale * (second_OR @ first_RI)
        return to_fixed(weight_OI.double() / UNIT + moved_OI, name)

    return read_merged


def save_adapter(
    folder: Path,
    model: ModelSpec,
    read: Read,
    base: str | None,
    texts: Mapping[str, str],
    *,
    replace: bool = False,
) -> None:
    """Write the folder, complete or not at all. `base`: name of the base's folder, if known; `texts`: more files.

    `replace` allows such a folder to be there already. Raises ConfigError if something else is, DiskFault.
    """
    config = json.dumps(adapter_config(model, base), indent=2)
    with new_folder(folder, replace=replace, is_export=_is_adapter) as part:
        save_tensors(part / ADAPTER_WEIGHTS, adapter_tensors(model, read))
        for name, text in {**texts, ADAPTER_CONFIG: config}.items():
            write_whole(part / name, f"{text}\n".encode(), mode=PUBLIC)


def adapter_tensors(model: ModelSpec, read: Read) -> dict[str, Tensor]:
    """All factors as peft names and shapes them, float32."""
    found: dict[str, Tensor] = {}
    for atom in atoms(model.base):
        if is_target(atom.name, model.lora_targets):
            for name, value in zip(factors_of(atom.name), _factors(model, read, atom.name), strict=True):
                found[_PREFIX + name] = value.float()
    return found


def adapter_config(model: ModelSpec, base: str | None) -> dict[str, Any]:
    """The content of `adapter_config.json`. `base`: a folder or a name of the hub, where it is known."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": model.lora_rank,
        "lora_alpha": model.lora_scale * model.lora_rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": list(TARGETS[model.lora_targets]),
    }


def _factors(model: ModelSpec, read: Read, target: str) -> tuple[Tensor, Tensor]:
    """A `[r, in]` and B `[out, r]` of a matrix, float64."""
    first, second = (read(name).double() / UNIT for name in factors_of(target))
    return first.view(model.lora_rank, -1), second.view(-1, model.lora_rank)


def _is_adapter(folder: Path) -> bool:
    """Whether a folder holds nothing but what `save_adapter` writes, which can be written again."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return ADAPTER_CONFIG in names and names <= {ADAPTER_CONFIG, ADAPTER_WEIGHTS, "README.md"}
