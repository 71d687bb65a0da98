"""Names of tensors in a Hugging Face folder: those of our atoms, but for the mixtures of Mixtral."""

from atoll.node.import_export.huggingface.config import family_of
from atoll.protocols.run.model_spec import ModelSpec, atoms

_OURS = (".mlp.", ".gate_proj.", ".up_proj.", ".down_proj.")
_MIXTRAL = (".block_sparse_moe.", ".w1.", ".w3.", ".w2.")


def published(model: ModelSpec) -> dict[str, str]:
    """Name of each atom -> name of its tensor, in the agreed order. Raises ConfigError: there is no class."""
    is_mixtral = family_of(model) == "mixtral"
    return {atom.name: _mixtral(atom.name) if is_mixtral else atom.name for atom in atoms(model)}


def _mixtral(name: str) -> str:
    for ours, theirs in zip(_OURS, _MIXTRAL, strict=True):
        name = name.replace(ours, theirs)
    return name
