"""A package's model for tests: a small UNet that marks a dashed lane in grey pictures, with a synthetic set.

An example is a picture of 32×32 pixels, row by row. The upper seven bits of a byte are the brightness, the lowest
is the mask: whether the pixel lies in the lane, between its dashes too. The picture is noisy and has a second,
bright line that is no lane: it goes across.

Letters: B examples, X bytes of one example, C channels, H rows, W columns.
"""

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

SIDE = 32
TRAIN, VAL = 512, 64
"""Examples of each set."""
_WIDTHS = (8, 16, 32)


class UNet(nn.Module):
    """Two halvings; what each level had goes to the same level on the way up."""

    def __init__(self) -> None:
        super().__init__()
        low, mid, high = _WIDTHS
        self.down1, self.down2, self.bottom = _pair(1, low), _pair(low, mid), _pair(mid, high)
        self.up2, self.up1 = _pair(high + mid, mid), _pair(mid + low, low)
        self.head = nn.Conv2d(low, 1, 1)

    def forward(self, picture_B1HW: Tensor) -> Tensor:
        """Logits `[B, H, W]` of the mask."""
        first = self.down1(picture_B1HW)
        second = self.down2(functional.max_pool2d(first, 2))
        third = self.bottom(functional.max_pool2d(second, 2))
        second = self.up2(torch.cat((_twice(third), second), 1))
        return self.head(self.up1(torch.cat((_twice(second), first), 1)))[:, 0]


def _pair(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.ReLU(),
        nn.Conv2d(channels_out, channels_out, 3, padding=1), nn.ReLU(),
    )  # fmt: skip


def _twice(values: Tensor) -> Tensor:
    return functional.interpolate(values, scale_factor=2)


class Lanes:
    """What the entry point `lanes.1` names."""

    context = SIDE * SIDE
    saved = 400_000

    def __init__(self) -> None:
        # He's variance, 2 / fan-in; the arena wants 1/σ² as a whole number.
        self.starts = {
            name: (tuple(value.shape), math.ceil(math.prod(value.shape[1:]) / 2) if value.dim() > 1 else 0)
            for name, value in UNet().named_parameters()
        }

    def examples(self) -> tuple[bytes, bytes]:
        return pictures(TRAIN, 1), pictures(VAL, 2)

    def build(self) -> nn.Module:
        return UNet()

    def loss(self, module: nn.Module, example_BX: Tensor) -> Tensor:
        """Binary cross-entropy of pixels and Dice loss of pictures: a mean over pictures."""
        picture_B1HW, mask_BHW = split(example_BX)
        logit_BHW = module(picture_B1HW).float()
        share_BHW = logit_BHW.sigmoid()
        both, all_of = (share_BHW * mask_BHW).sum((1, 2)), (share_BHW + mask_BHW).sum((1, 2))
        dice = 1 - (2 * both + 1) / (all_of + 1)
        return functional.binary_cross_entropy_with_logits(logit_BHW, mask_BHW) + dice.mean()


def split(example_BX: Tensor) -> tuple[Tensor, Tensor]:
    """Pictures `[B, 1, H, W]`, about −1 … 1, and masks `[B, H, W]`, 0 or 1; both float32."""
    byte_BHW = example_BX.view(-1, SIDE, SIDE)
    return ((byte_BHW >> 1).float() / 64 - 1)[:, None], (byte_BHW & 1).float()


def iou(module: nn.Module, example_BX: Tensor) -> float:
    """Intersection over union of all pixels that the module marks and those of the mask."""
    picture_B1HW, mask_BHW = split(example_BX)
    with torch.no_grad():
        marked_BHW = module(picture_B1HW) > 0
    is_lane_BHW = mask_BHW > 0
    return float((marked_BHW & is_lane_BHW).sum() / (marked_BHW | is_lane_BHW).sum())


def pictures(count: int, key: int) -> bytes:
    """Examples end to end. From integers only: every machine makes the same bytes."""
    source = np.random.Philox(key=key)
    return b"".join(_picture(source) for _ in range(count))


def _picture(source: np.random.Philox) -> bytes:
    start, slope, bend, dash, across, tilt = (int(word >> np.uint64(40)) for word in source.random_raw(6))
    row_H1, col_W = np.arange(SIDE)[:, None], np.arange(SIDE)
    lane_H1 = 8 + start % 16 + ((slope % 17 - 8) * row_H1 + (bend % 9 - 4) * row_H1 * row_H1 // SIDE) // 16
    mask_HW = abs(col_W - lane_H1) <= 1 + row_H1 // 16  # wider where it is near
    is_painted_H1 = (row_H1 + dash % 8) % 8 < 5
    line_W = 4 + across % 24 + (tilt % 9 - 4) * col_W // 16
    noise_HW = (source.random_raw(SIDE * SIDE) >> np.uint64(59)).astype(np.int64).reshape(SIDE, SIDE)
    grey_HW = 20 + row_H1 + noise_HW + 35 * (mask_HW & is_painted_H1) + 35 * (row_H1 == line_W)
    return (grey_HW.clip(0, 127) << 1 | mask_HW).astype(np.uint8).tobytes()
