"""Makes a run: from a preset and a text, with weights drawn from the seed or given by a folder."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import click
from msgspec.structs import replace

from atoll.node.config.home import Home
from atoll.node.import_export.source_options import HuggingFaceSource, RunSource, UpcycleOptions
from atoll.node.learning.data.dataset import digest_of
from atoll.node.learning.data.shakespeare import default_cache
from atoll.p2p.system.atomic_files import write_whole
from atoll.protocols.errors import ConfigError
from atoll.protocols.identity import Identity
from atoll.protocols.run.run_spec import RunSpec, sign_run

UPCYCLE_FORM = "experts=E,per_token=K[,noise_shift=N]"
_KEYS = ("experts", "per_token", "noise_shift")


class Draft(NamedTuple):
    """A run as the user describes it, not signed yet."""

    spec: RunSpec
    """The preset's spec."""
    adjust: Callable[[RunSpec], RunSpec]
    """Applies the user's changes to a spec."""
    text: str
    """Path of the text where the source is `file:`."""


def write_run(home: Home, path: Path, draft: Draft, owner: Identity, origin: RunSource | None) -> bytes:
    """Sign a run and write it to `path`, its files into the home; the bytes. Raises ConfigError, DiskFault."""
    if origin is None:
        data = sign_run(_complete(draft.adjust(draft.spec), draft.text, None), owner)
        write_whole(path, data)
        return data
    from atoll.node.import_export.compatibility_check import measure_fit  # loads torch: only to read weights
    from atoll.node.import_export.import_run import importing, store_run

    with importing(origin, home.runs, draft.spec.seed) as found:
        spec = draft.adjust(found.applied(draft.spec, draft.spec.model.context))
        found.check(spec)
        spec = _complete(spec, draft.text, found.tokenizer)
        warnings = [found.warning]
        if isinstance(origin, HuggingFaceSource):
            fit = measure_fit(spec, found.weights, found.tokenizer, draft.text)
            warnings.append(fit.warning(origin.without_fit))
        data = sign_run(spec, owner)
        store_run(found, home.run(spec.id), lambda: write_whole(path, data))
    for warning in filter(None, warnings):
        click.echo(f"warning: {warning}", err=True)
    return data


def origin_of(folder: Path | None, upcycle: str | None, without_fit: bool) -> HuggingFaceSource | None:
    """From `--from-hf`, `--upcycle` and `--without-fit`. Raises ConfigError."""
    if folder is None:
        if upcycle is not None:
            raise ConfigError("--upcycle makes experts of given weights", hint="give --from-hf DIR too")
        if without_fit:
            raise ConfigError("--without-fit is about given weights", hint="give --from-hf DIR too")
        return None
    return HuggingFaceSource(folder, None if upcycle is None else _upcycle(upcycle), without_fit)


def _complete(spec: RunSpec, text: str, tokenizer: bytes | None) -> RunSpec:
    found = digest_of(spec.data, text, default_cache(), tokenizer)
    return replace(spec, data=replace(spec.data, digest=found))


def _upcycle(text: str) -> UpcycleOptions:
    found: dict[str, int] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        if key not in _KEYS or key in found or not value.isascii() or not value.isdigit() or len(value) > 6:
            raise ConfigError(f"--upcycle {text}: {part!r} is not of the form {UPCYCLE_FORM}")
        found[key] = int(value)
    if "experts" not in found or "per_token" not in found:
        raise ConfigError(f"--upcycle {text}: it needs the form {UPCYCLE_FORM}")
    return UpcycleOptions(found["experts"], found["per_token"], found.get("noise_shift"))
