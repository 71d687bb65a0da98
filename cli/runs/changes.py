"""`--set KEY=VALUE` of a run that is being made."""

import json
from typing import Any

import msgspec

from atoll.node.config.node_config import to_struct
from atoll.node.runs.presets import with_decay_at_end
from atoll.protocols.errors import ConfigError
from atoll.protocols.run.run_spec import RunSpec

ONE_HOLDERS_RATE = 2.0
"""Learning rate of experts that one member each trains, over the others' (docs/experts.md#the-experts-rate)."""
FIXED = ("version", "owner", "name", "data", "admission", "start", "base", "serving")
"""What `--set` may not touch."""


def with_changes(spec: RunSpec, changes: tuple[str, ...]) -> RunSpec:
    """The spec with `key.key=value` set; values are JSON, or else text. Raises ConfigError."""
    tree: dict[str, Any] = msgspec.to_builtins(spec, builtin_types=(bytes,))
    given = {change.partition("=")[0] for change in changes}
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals:
            raise ConfigError(f"--set {change}: not a KEY=VALUE", hint="for example --set outer.rounds=20")
        if key.split(".")[0] in FIXED:
            raise ConfigError(
                f"--set {change}: {key} cannot be set",
                hint="it comes from NAME, --data, --from-hf, --admission and the key",
            )
        _put(tree, key.split("."), _value(text))
        if key == "inner.optimizer":
            _forget_numbers(tree["inner"], given)
    changed = to_struct(tree, RunSpec, strict=False)
    if changed.inner.optimizer == "spsa":
        # Only what has the types of a RunSpec can be looked into.
        tree = msgspec.to_builtins(changed, builtin_types=(bytes,))
        _forget_gradients(tree, given)
        changed = to_struct(tree, RunSpec, strict=False)
    changed = _adapted(changed)
    if "inner.total_steps" not in given:
        changed = _with_schedule_of(changed, spec)
        if "inner.warmup_steps" not in given:
            changed = _with_warm_up_of(changed, spec)
    if "inner.expert_lr" not in given:
        changed = _with_experts_rate(changed)
    changed.check()
    return changed


def _with_schedule_of(changed: RunSpec, before: RunSpec) -> RunSpec:
    """The changed run with a learning rate that ends with it: a decay always, a cosine where its steps changed.

    A run that continues another one goes on in the cosine of that one, which a longer one would raise again.
    """
    inner = changed.inner
    is_cosine = inner.decay_256 is msgspec.UNSET
    if is_cosine and not inner.first_step and changed.last_step != before.last_step:
        return msgspec.structs.replace(
            changed, inner=msgspec.structs.replace(inner, total_steps=max(1, changed.last_step))
        )
    return with_decay_at_end(changed)


def _with_warm_up_of(changed: RunSpec, before: RunSpec) -> RunSpec:
    """The changed run with a warm-up of no greater share of its steps than before; a longer run keeps its steps.

    A run that continues another one is past its warm-up, or goes on in it.
    """
    warmup, steps = before.inner.warmup_steps, before.last_step
    if not warmup or before.inner.first_step or changed.last_step >= steps:
        return changed
    shorter = max(1, warmup * changed.last_step // steps)
    return msgspec.structs.replace(changed, inner=msgspec.structs.replace(changed.inner, warmup_steps=shorter))


def _with_experts_rate(spec: RunSpec) -> RunSpec:
    """The run with a higher rate of experts that have one holder each, where that was shown to help.

    A run that continues another one keeps its rate.
    """
    inner = spec.inner
    if inner.optimizer != "adamw" or spec.outer.holders != 1 or inner.expert_lr != 1.0 or inner.first_step:
        return spec
    return msgspec.structs.replace(spec, inner=msgspec.structs.replace(inner, expert_lr=ONE_HOLDERS_RATE))


def _forget_numbers(inner: dict[str, Any], given: set[str]) -> None:
    """Drop the preset's numbers of an optimizer that is not wanted; the user's own stay, and are checked.

    Its schedule goes with it: with others it was not measured.
    """
    for name in ("muon_lr", "muon_momentum", "decay_256"):
        if inner["optimizer"] != "muon" and f"inner.{name}" not in given:
            inner.pop(name, None)


def _forget_gradients(tree: dict[str, Any], given: set[str]) -> None:
    """Replace the preset's settings that steps without gradients cannot have; the user's own stay.

    A payload gets room for the steps of the longest round.
    """
    most = max((stage[1] for stage in tree["outer"]["stages"]), default=1) * tree["pace"]["most_256"]
    wanted: tuple[tuple[str, Any], ...] = (
        ("inner.weight_decay", 0.0),
        ("outer.overlap_steps", 0),
        ("outer.overlap_most", None),
        ("compress.codec", "scalar"),
        ("compress.k", -(-most // 256)),
        ("compress.feedback", 0.0),
        ("compress.warmup", None),
        ("reduce", None),
    )
    for key, value in wanted:
        if key in given:
            continue
        _put(tree, key.split("."), value)
        if value is None and "." in key:
            tree[key.split(".")[0]].pop(key.split(".")[1])


def _adapted(spec: RunSpec) -> RunSpec:
    """Turn the given weights of a run into its base where it is a LoRA run; its start is then the seed's."""
    if not (spec.model.lora_rank and spec.start) or spec.start.moments:
        return spec
    return msgspec.structs.replace(spec, base=spec.start.weights, start=msgspec.UNSET)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _put(tree: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        inner = tree.get(key)
        if not isinstance(inner, dict):
            raise ConfigError(f"--set: there is no {'.'.join(keys)}", hint=f"known keys: {', '.join(tree)}")
        tree = inner
    tree[keys[-1]] = value
