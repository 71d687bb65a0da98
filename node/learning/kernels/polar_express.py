"""Steps of Newton and Schulz towards the polar factor UVᵀ of a matrix USVᵀ.

Source: Polar Express, arXiv 2505.16932, rounded as MuLoCo (arXiv 2505.23725) has them.
"""

COEFFICIENTS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""(a, b, c) of each step X ← aX + (bA + cA²)X with A = XXᵀ, as MuLoCo has them."""
