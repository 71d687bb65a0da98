"""Our decoder beside a folder exported from it, as transformers computes it: the largest difference of a logit."""

import importlib
import importlib.util
from pathlib import Path

import torch

from atoll.node.checkpoint.local import load_local
from atoll.node.import_export.export_run import STATE
from atoll.node.learning.model.decoder import Decoder
from atoll.node.learning.outer.fixed import to_float
from atoll.protocols.errors import ConfigError
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.run_spec import RunSpec
from atoll_bench.module_values import fill_module

RIVAL = "transformers"
_SEQUENCES = 2


def is_installed() -> bool:
    """Whether there is anything to compare with: it is no dependency of ours."""
    return importlib.util.find_spec(RIVAL) is not None


def difference(spec: RunSpec, run_folder: Path, exported: Path) -> float:
    """The largest, over all tokens of some random sequences. Raises ConfigError where a side cannot be loaded."""
    if not is_installed():
        raise ConfigError(f"{RIVAL} is not installed")
    found = load_local(run_folder / STATE, spec.id)
    if found is None:
        raise ConfigError(f"{run_folder} has no saved state")
    arena = arena_of(spec.model)
    ours = Decoder(spec.model)
    fill_module(ours, to_float(found.tensors["final"]), arena)
    shape = (_SEQUENCES, spec.model.context)
    tokens_BT = torch.randint(0, spec.model.vocab, shape, generator=torch.Generator().manual_seed(4))
    theirs = importlib.import_module(RIVAL).AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    with torch.no_grad():
        return float((theirs(input_ids=tokens_BT).logits - ours(tokens_BT)).abs().max())
