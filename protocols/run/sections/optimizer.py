"""What the keys of the inner optimizer cannot go with (docs/inner-optimizer.md)."""

from typing import Any

from atoll.protocols.errors import ConfigError

DEFAULT_MUON_MOMENTUM = 0.95
WHOLE_SHARE = 1.0
"""`inner.momentum_share` of AdamW as it is."""


def check_optimizer(inner: Any) -> None:
    """Refuse Muon's keys in a run that it does not train, and a slow momentum that AdamW cannot have.

    `inner`: the RunSpec's InnerSpec. Raises ConfigError.
    """
    given = {"muon_lr": inner.muon_lr != 1.0, "muon_momentum": inner.muon_momentum != DEFAULT_MUON_MOMENTUM}
    for key in (key for key, is_set in given.items() if is_set and inner.optimizer != "muon"):
        raise ConfigError(f"inner.{key} is for runs with inner.optimizer muon")
    if inner.momentum_share == WHOLE_SHARE:
        return
    if inner.optimizer != "adamw":
        raise ConfigError("inner.momentum_share is for runs with inner.optimizer adamw: Muon has its own momentum")
    # m² ≤ C·v needs β₁² < β₂ (Cauchy and Schwarz). Else a momentum outlives the second moment that it is divided
    # by: after a burst of gradients the step grows while they are forgotten.
    if inner.beta1**2 >= inner.beta2:
        raise ConfigError(
            f"inner.momentum_share needs inner.beta2 above {inner.beta1**2:.6g}, which is inner.beta1 squared",
            hint="with inner.beta1 0.995 set inner.beta2 to 0.999",
        )
