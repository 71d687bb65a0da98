"""Saddle problems that members share: each has an operator F_m, and a solution is where their mean is zero.

F(x, y) = (∇ₓf, −∇ᵧf) of min over x, max over y of f. Values lie in one vector z = (x, y).
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


class Problem(Protocol):
    """Operators of M members over vectors of `size` values."""

    members: int
    size: int

    def operator(self, member: int, point: Vector) -> Vector:
        """F_m at a point."""


class Bilinear:
    """f_m = xᵀA_m y + a_mᵀx − b_mᵀy + λ/2·(|x|² − |y|²), A_m circulant: a rotation with a weak pull inwards."""

    def __init__(self, members: int, side: int, pull: float, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.members, self.size, self.pull = members, 2 * side, pull
        self._side = side
        # A random circulant matrix has singular values of about 1; it is applied by its Fourier transform.
        self._first = np.fft.rfft(rng.normal(size=(members, side)) / np.sqrt(side), axis=1)
        self._linear = rng.normal(size=(members, 2 * side))

    def operator(self, member: int, point: Vector) -> Vector:
        """F_m at a point."""
        x, y = np.fft.rfft(point[: self._side]), np.fft.rfft(point[self._side :])
        first = self._first[member]
        across = np.fft.irfft(first * y, self._side), -np.fft.irfft(first.conj() * x, self._side)
        moved: Vector = np.concatenate(across) + self._linear[member] + self.pull * point
        return moved

    def solution(self) -> Vector:
        """Where the mean of the operators is zero: two linear equations for each frequency."""
        first, linear = self._first.mean(0), self._linear.mean(0)
        p, q = np.fft.rfft(linear[: self._side]), np.fft.rfft(linear[self._side :])
        bottom = self.pull**2 + abs(first) ** 2
        x, y = (first * q - self.pull * p) / bottom, -(first.conj() * p + self.pull * q) / bottom
        found: Vector = np.concatenate([np.fft.irfft(each, self._side) for each in (x, y)])
        return found


class RobustRegression:
    """min over weights w, max over a shift r of all inputs: mean (wᵀ(x + r) − t)²/2 + λ/2·|w|² − β/2·|r|².

    An adversary moves the inputs of every member by the same r, and pays β for its length.
    """

    def __init__(self, members: int, features: int, rows: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.members, self.size, self._features = members, 2 * features, features
        truth = rng.normal(size=features) / np.sqrt(features)
        self._inputs = rng.normal(size=(members, rows, features))
        self._targets = self._inputs @ truth + 0.1 * rng.normal(size=(members, rows))

    def operator(self, member: int, point: Vector) -> Vector:
        """F_m at a point."""
        w, r = point[: self._features], point[self._features :]
        moved = self._inputs[member] + r
        error = moved @ w - self._targets[member]
        found: Vector = np.concatenate([moved.T @ error / len(error) + 0.1 * w, -(error.mean() * w) + 2.0 * r])
        return found
