"""Muon and AdamW by their formulas, in float64 with numpy; for tests to compare with."""

import math

import numpy as np

COEFFICIENTS = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]


def polar(matrix):
    """Each singular value s of M/‖M‖ goes through the five polynomials as + bs³ + cs⁵; singular vectors stay."""
    u, s, vt = np.linalg.svd(matrix / np.linalg.norm(matrix), full_matrices=False)
    for a, b, c in COEFFICIENTS:
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ vt


class PlainMuon:
    """One matrix."""

    def __init__(self, value, momentum, decay):
        self.value, self.m = np.array(value, np.float64), np.zeros(value.shape)
        self.momentum, self.decay = momentum, decay

    def step(self, gradient, rate):
        self.m = self.momentum * self.m + gradient  # the usual sum: its scale cancels
        direction = polar(gradient + self.momentum * self.m)
        size = 0.2 * math.sqrt(max(self.value.shape))
        self.value = (1 - rate * self.decay) * self.value - rate * size * direction


class PlainAdamW:
    """One tensor."""

    def __init__(self, value, spec, decay):
        self.value = np.array(value, np.float64)
        self.first, self.second, self.steps = 0.0, 0.0, 0
        self.spec, self.decay = spec, decay

    def step(self, gradient, rate):
        spec = self.spec
        self.steps += 1
        self.first = spec.beta1 * self.first + (1 - spec.beta1) * gradient
        self.second = spec.beta2 * self.second + (1 - spec.beta2) * gradient**2
        share = spec.momentum_share  # 1: AdamW; less: the quasi-hyperbolic form
        up = share * self.first / (1 - spec.beta1**self.steps) + (1 - share) * gradient
        down = np.sqrt(self.second / (1 - spec.beta2**self.steps)) + spec.eps
        self.value = self.value * (1 - rate * self.decay) - rate * up / down
