"""The validation loss of the weights that a node saved last. Needs no running node."""

from pathlib import Path

import torch

from atoll.node.config.devices import devices_of
from atoll.node.config.node_config import NodeConfig
from atoll.node.import_export.export_run import load_saved
from atoll.node.learning.data.dataset import GivenTokenizer, open_text
from atoll.node.learning.data.shakespeare import default_cache
from atoll.node.learning.inner.evaluate import VAL_WINDOWS
from atoll.node.learning.plugged.loading import examples_of
from atoll.node.worker.learner import Learner
from atoll.p2p.blobs.store import BLOBS, blob_path
from atoll.protocols.errors import ConfigError
from atoll.protocols.local.control_messages import EvaluationResult
from atoll.protocols.run.run_spec import RunSpec


def evaluate_saved(spec: RunSpec, run_folder: Path, config: NodeConfig) -> EvaluationResult:
    """The loss of the final state that was saved last below `run_folder`, on the windows that a node takes.

    Work of rounds that are not final is not in it. Raises ConfigError, CorruptFault, DiskFault, Unreachable.
    """
    found = load_saved(spec, run_folder)
    if found is None:
        raise ConfigError(f"no weights of {spec.name!r} were saved in this home", hint="begin with `atoll start`")
    torch.set_num_threads(config.threads)
    blob = spec.data.tokenizer_blob
    given = GivenTokenizer(blob_path(run_folder / BLOBS, blob), spec.model.vocab) if blob else None
    data = open_text(spec, config.data, default_cache(), run_folder / BLOBS, given, examples_of)
    base = blob_path(run_folder / BLOBS, spec.base) if spec.base else None
    learner = Learner(spec, devices_of(config.device)[0], config.frozen, config.frozen_on_host, base=base)
    windows_WT1, size_bytes = data.validation(VAL_WINDOWS), data.validation_bytes(VAL_WINDOWS)
    loss = learner.evaluate(found.tensors["final"], windows_WT1, size_bytes)
    return EvaluationResult(found.body.final, loss.val_bpb, loss.val_loss)
