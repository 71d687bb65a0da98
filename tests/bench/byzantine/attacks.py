"""What liars send: each attack makes the values of every liar of a round, who know what all honest members send.

Values go through the codec as honest ones do, so that only legal payloads are folded. A liar that attacks by its
direction alone sends the median length of the honest, in each chunk: more would be clipped.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Seen(NamedTuple):
    """What liars know in a round."""

    number: int
    honest_HC4096: Tensor
    """What each honest member sends, decoded, float32."""
    own_LC4096: Tensor
    """What each liar would send if it were honest; zeros for attacks that do not train."""
    first_C4096: Tensor
    """What the first honest member sent in the first round."""
    noise: torch.Generator
    honest_step_C4096: Tensor
    """The fold of what the honest send, without a rule and without lies: how far it moves the model."""
    fold: Callable[[Tensor], Tensor]
    """How far the round's own fold, with its codec and rule, moves the model with these lies `[L, C, 4096]`."""


Attack = Callable[[Seen], Tensor]
"""Values float32 `[L, C, 4096]`."""


def _to_length(values: Tensor, seen: Seen, times: float = 1.0) -> Tensor:
    """The same direction with the median length of the honest in each chunk."""
    length = seen.honest_HC4096.norm(dim=-1).median(dim=0).values * times
    found: Tensor = values / values.norm(dim=-1, keepdim=True).clamp_min(1e-30) * length[:, None]
    return found


def each_alike(value_C4096: Tensor, seen: Seen) -> Tensor:
    """The same values for every liar."""
    return value_C4096.expand_as(seen.own_LC4096)


def _noise(seen: Seen) -> Tensor:
    return torch.randn(seen.own_LC4096.shape, generator=seen.noise)


def sign_flip(seen: Seen) -> Tensor:
    return -seen.own_LC4096


def scaling(seen: Seen) -> Tensor:
    return -10 * seen.own_LC4096


def noise(seen: Seen) -> Tensor:
    return _to_length(_noise(seen), seen, 3.0)


def label_flip(seen: Seen) -> Tensor:
    return seen.own_LC4096


def alie(seen: Seen) -> Tensor:
    """A little is enough: the mean, shifted by one and a half standard deviations (Baruch et al., 2019)."""
    return each_alike(seen.honest_HC4096.mean(0) - 1.5 * seen.honest_HC4096.std(0), seen)


def inner_product(times: float) -> Attack:
    """Inner-product manipulation (Xie et al., 2019): so many times the mean, against it."""

    def attack(seen: Seen) -> Tensor:
        return each_alike(-times * seen.honest_HC4096.mean(0), seen)

    return attack


def min_max_strength(seen: Seen) -> float:
    """How many times the mean can be taken from itself until a liar is further from an honest one than two honest
    ones are."""
    flat = seen.honest_HC4096.flatten(1)
    mean = flat.mean(0)
    most = torch.cdist(flat, flat).max()
    low, high = 0.0, 16.0
    for _ in range(12):
        middle = (low + high) / 2
        far = (flat - mean * (1 - middle)).norm(dim=1).max()
        low, high = (middle, high) if far <= most else (low, middle)
    return low


def min_max(seen: Seen) -> Tensor:
    """The mean, moved against itself as far as no liar is further from an honest one than two honest ones are
    (Shejwalkar, Houmansadr, 2021)."""
    return each_alike(seen.honest_HC4096.mean(0) * (1 - min_max_strength(seen)), seen)


def min_angle(seen: Seen) -> Tensor:
    """As min-max, of directions: as far against the mean as no liar has a smaller cosine with an honest one than
    two honest ones have; each with noise of its own, so that they are no copies."""
    flat = functional.normalize(seen.honest_HC4096.flatten(1), dim=1)
    least, mean = (flat @ flat.T).min(), functional.normalize(flat.mean(0), dim=0)
    apart = _noise(seen) * (seen.honest_HC4096 != 0).any(0)
    shared = (flat @ mean).mean()
    lies = []
    for noise in functional.normalize(apart.flatten(1), dim=1):
        own = shared * mean + (1 - shared**2).sqrt() * noise
        low, high = 0.0, 1.0
        for _ in range(12):
            middle = (low + high) / 2
            tried = functional.normalize(own - middle * mean, dim=0)
            low, high = (middle, high) if (flat @ tried).min() >= least else (low, middle)
        lies.append((own - low * mean).view_as(seen.first_C4096))
    length: Tensor = seen.honest_HC4096.flatten(1).norm(dim=1).median()
    return torch.stack(lies) * length


def mimic(seen: Seen) -> Tensor:
    """All send what one honest member sends (Karimireddy et al., 2022)."""
    return each_alike(seen.honest_HC4096[0], seen)


def collusion(seen: Seen) -> Tensor:
    """Against the mean, and apart from each other: with noise of their own they are no copies."""
    against = _to_length(-seen.honest_HC4096.mean(0), seen)
    apart = _to_length(_noise(seen) * (seen.honest_HC4096 != 0).any(0), seen)
    return _to_length(0.55 * against + 0.83 * apart, seen)


def replay(seen: Seen) -> Tensor:
    """What an honest member sent in the first round, again and again."""
    return each_alike(seen.first_C4096, seen)


def free_ride(seen: Seen) -> Tensor:
    """Nothing."""
    return torch.zeros_like(seen.own_LC4096)


def lone_index(seen: Seen) -> Tensor:
    """All length on places that at most one honest member sends, against it."""
    senders = (seen.honest_HC4096 != 0).sum(0)
    against = -seen.honest_HC4096.sum(0)
    return each_alike(_to_length(torch.where(senders <= 1, against, 0), seen), seen)


ATTACKS: dict[str, Attack] = {
    "sign flip": sign_flip,
    "scaling": scaling,
    "noise": noise,
    "label flip": label_flip,
    "ALIE": alie,
    "IPM 0.5": inner_product(0.5),
    "IPM 3": inner_product(3.0),
    "min-max": min_max,
    "min-max angle": min_angle,
    "mimic": mimic,
    "collusion": collusion,
    "replay": replay,
    "free ride": free_ride,
    "lone index": lone_index,
}
TRAINED = ("sign flip", "scaling", "label flip")
"""Those of them whose liars train."""
