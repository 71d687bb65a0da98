"""`run new --method NAME` and `--slices E`: the settings of a published method, or of a dense model in slices.

The table of methods is the one of docs/outer-loop.md: a test compares them. Settings come before those of `--set`,
which have the last word.
"""

from atoll.protocols.errors import ConfigError
from atoll.protocols.run.run_spec import MAX_HOLDERS

_FRAGMENTS = 4
"""Of Streaming DiLoCo where `--fragments` says nothing: what the smallest preset can have."""
_ADAMW, _AT_ONCE, _UNREDUCED = "inner.optimizer=adamw", "outer.overlap_steps=0", "reduce=null"
_DENSE = f"compress.codec=int8 compress.k=4096 compress.feedback=0 {_AT_ONCE} {_UNREDUCED}"
"""Stands for float32: its error is small, and no error feedback is kept."""
_SPARSE = f"compress.k=64 {_ADAMW} {_AT_ONCE}"
_DILOCO = "outer.rule=nesterov outer.alpha_256=179"
_STALE = f"{_ADAMW} {_DENSE} pace.least_256=256 pace.stale="
METHODS = {
    "sparseloco": f"{_SPARSE} compress.feedback=0.95",
    "sparseloco-code": f"{_SPARSE} compress.feedback=0.95 compress.codec=lookup2 outer.floor_256=1"
    f" outer.aggregate=clip outer.most_256=65536 {_UNREDUCED}",
    "average": f"outer.rule=average {_ADAMW} {_DENSE}",
    "diloco": f"{_DILOCO} {_ADAMW} {_DENSE}",
    "muloco": f"{_DILOCO} outer.momentum_256=154 inner.optimizer=muon {_DENSE}",
    "slowmo": f"outer.rule=slowmo outer.momentum_256=128 {_ADAMW} {_DENSE}",
    "streaming": f"outer.rule=nesterov outer.alpha_256=102 outer.late=blend compress.codec=e3m0 compress.k=4096"
    f" compress.feedback=0 {_ADAMW} {_UNREDUCED}",
    "edit": f"{_DILOCO} outer.momentum_256=205 outer.aggregate=edit {_ADAMW} {_DENSE}",
    "co2": f"outer.rule=co2 outer.clip_65536=1311 {_ADAMW} {_DENSE}",
    "gossip": f'outer.gossip={{"steps":1,"first_256":0,"last_256":102}} outer.rule=average {_ADAMW} {_DENSE}',
    "isoloco": "outer.spectrum=isotropic outer.rule=nesterov outer.alpha_256=461 outer.momentum_256=205"
    f" {_ADAMW} {_DENSE}",
    "econtrol": f"{_SPARSE} compress.feedback_rule=econtrol compress.feedback=1 outer.rule=slowmo"
    f" outer.momentum_256=255 outer.floor_256=256 pace.least_256=256 {_UNREDUCED}",
    "dgc": f"{_SPARSE} compress.feedback_rule=dgc compress.feedback=1 compress.warmup=[[4,1024],[8,256]]"
    f" outer.alpha_256=26 {_UNREDUCED}",
    "lgreco": f'{_SPARSE} compress.feedback=0.95 compress.sizes={{"goal":"bytes"}} {_UNREDUCED}',
    "fedbuff": f'{_STALE}{{"most":8,"weights":"fedbuff"}} pace.quorum_256=64 pace.grace_256=32',
    "fedfix": f'{_STALE}{{"most":8,"weights":"fedfix"}} pace.quorum_256=1 pace.grace_256=64',
}
"""By name, what makes a run of any preset the published method."""


def settings_of(method: str | None, slices: int | None, changes: tuple[str, ...]) -> tuple[str, ...]:
    """All settings of a run, in their order: of the method, of the slices, and the user's own.

    What the user gives is left out of the others. Raises ConfigError for a name that is none.
    """
    if method is not None and method not in METHODS:
        raise ConfigError(f"--method {method}: no such method", hint=f"use one of {', '.join(METHODS)}")
    named = METHODS[method].split() if method else []
    sliced = [f"model.ffn_slices={slices}", f"outer.holders={MAX_HOLDERS}", _UNREDUCED] if slices else []
    given = keys_of(changes)
    return (*(one for one in (*named, *sliced) if one.partition("=")[0] not in given), *changes)


def fragments_of(method: str | None, fragments: int | None) -> int | None:
    """`--fragments`, or how many the method has; None: as the settings say."""
    return _FRAGMENTS if fragments is None and method == "streaming" else fragments


def keys_of(changes: tuple[str, ...]) -> set[str]:
    """The keys of `KEY=VALUE`s."""
    return {change.partition("=")[0] for change in changes}
