"""Exports a run's newest weights in this home as a GGUF file. Needs no running node."""

from collections.abc import Callable, Sequence
from pathlib import Path

from atoll.node.import_export.export_run import Exported, atom_reader, chosen_weights, tokenizer_json
from atoll.node.import_export.gguf_file import check_gguf, save_gguf
from atoll.node.import_export.model_card import model_facts, plain_text
from atoll.p2p.blobs.store import BLOBS
from atoll.protocols.local.control_messages import RoundStatus
from atoll.protocols.run.run_spec import RunSpec


def export_gguf(
    spec: RunSpec,
    run_folder: Path,
    to: Path,
    snapshot: Path | None,
    data: str,
    *,
    average: bool = False,
    rows: Sequence[RoundStatus] = (),
    replace: bool = False,
    report: Callable[[int, int], None] = lambda done, of: None,
) -> Exported:
    """Write the file `to`; arguments and errors are those of `export_run`."""
    spec.model.check_decoder()
    check_gguf(spec.model.base)
    found = chosen_weights(spec, run_folder, snapshot, average=average)
    facts = model_facts(spec, found.round, found.state, rows, is_average=average)
    about = {
        "general.name": plain_text(spec.name),
        "general.description": "; ".join(f"{name}: {value.replace('`', '')}" for name, value in facts.items()),
        "atoll.run": spec.id.hex(),
        "atoll.state_digest": found.state.hex(),
    }
    named = save_gguf(
        to,
        spec.model.base,
        atom_reader(spec, found, run_folder / BLOBS, report),
        tokenizer_json(spec.data, data, run_folder / BLOBS),
        spec.serving or None,
        about,
        replace=replace,
    )
    return Exported(named, found.round, found.state)
