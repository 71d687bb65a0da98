"""Exports the adapter of a LoRA run in this home as a folder that peft loads. Needs no running node."""

from collections.abc import Callable, Sequence
from pathlib import Path

from atoll.node.import_export.export_run import Exported, chosen_weights, trained_reader
from atoll.node.import_export.huggingface.lora import save_adapter
from atoll.node.import_export.model_card import MODEL_CARD, model_card
from atoll.protocols.errors import ConfigError
from atoll.protocols.local.control_messages import RoundStatus
from atoll.protocols.run.run_spec import RunSpec


def export_adapter(
    spec: RunSpec,
    run_folder: Path,
    to: Path,
    snapshot: Path | None,
    data: str,
    *,
    base: str | None = None,
    average: bool = False,
    rows: Sequence[RoundStatus] = (),
    replace: bool = False,
    report: Callable[[int, int], None] = lambda done, of: None,
) -> Exported:
    """Write the folder `to`; arguments and errors are those of `export_run`, and ConfigError for other runs.

    `base`: the folder or the name on the hub of the weights that the run was made from, for its readers; the run
    itself does not know it.
    """
    if not spec.base:
        raise ConfigError(
            f"{spec.name!r} has no adapter: it trains the whole model", hint="use `atoll model export hf`"
        )
    found = chosen_weights(spec, run_folder, snapshot, average=average)
    card = model_card(spec, found.round, found.state, rows, is_average=average)
    read = trained_reader(spec.model, found)
    save_adapter(to, spec.model, read, base, {MODEL_CARD: card}, replace=replace)
    return Exported("PeftModel", found.round, found.state)
