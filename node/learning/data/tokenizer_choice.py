"""The tokenizer that the owner of a new run chooses, and the vocabulary that its model gets."""

from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from atoll.node.learning.data.given import vocab_of
from atoll.node.learning.data.tokens import BPE_VOCAB, BYTES_VOCAB
from atoll.p2p.system.atomic_files import read_whole
from atoll.protocols.blobs import manifest_of_bytes
from atoll.protocols.errors import ConfigError, CorruptFault
from atoll.protocols.run.run_spec import TOKENIZER_MAX_BYTES, RunSpec, Tokenizer


class TokenizerChoice(NamedTuple):
    """A tokenizer, and what a run has of it."""

    name: Tokenizer
    vocab: int
    """Rows of the model's embedding."""
    data: bytes | None = None
    """Bytes of the `tokenizer.json` that travels with the run; None for a built-in one."""

    def applied(self, spec: RunSpec) -> RunSpec:
        """The spec with this tokenizer, and a model of its vocabulary."""
        blob = b"" if self.data is None else manifest_of_bytes(self.data).id
        data = replace(spec.data, tokenizer=self.name, tokenizer_blob=blob)
        return replace(spec, model=replace(spec.model, vocab=self.vocab), data=data)


def choose_tokenizer(chosen: str) -> TokenizerChoice:
    """`bytes`, `bpe8k`, or the path of a `tokenizer.json`, which is checked. Raises ConfigError, DiskFault."""
    if chosen == "bytes":
        return TokenizerChoice("bytes", BYTES_VOCAB)
    if chosen == "bpe8k":
        return TokenizerChoice("bpe8k", BPE_VOCAB)
    path = Path(chosen).expanduser()
    if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe is empty when it is read again
        raise ConfigError(f"{path} is not a file", hint="save the tokenizer as a file, and give its path")
    try:
        data = None if path.is_dir() else read_whole(path, max_bytes=TOKENIZER_MAX_BYTES)
    except CorruptFault as error:
        raise ConfigError(f"{path} has more than {TOKENIZER_MAX_BYTES >> 20} MiB") from error
    if data is None:
        raise ConfigError(f"no tokenizer at {path}", hint="give bytes, bpe8k or a tokenizer.json")
    return TokenizerChoice("file", vocab_of(data), data)
