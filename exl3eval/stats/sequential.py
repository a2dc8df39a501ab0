"""Looking several times: how much of the error rate each look may spend.

Looking at 32, 64, 96 and 136 contexts with the full 5 % each time passes .101 of regressions at the margin
(measurement.md section 4). The spending function of Lan and DeMets (1983) that follows O'Brien and Fleming,
a(t) = 2 - 2 Phi(z_{alpha/2} / sqrt(t)), spends nearly nothing early and nearly all at the last look. Boundaries come
from the joint law of the standardised means at the looks, a Gaussian random walk in information time, by the recursion
of Armitage, McPherson and Rowe (1969); nothing is assumed about when earlier looks were planned, only their sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import optimize, stats

from exl3eval.errors import UsageError

_GRID_POINTS = 801
_GRID_REACH = 8.0


def spend_alpha(fraction: float, alpha: float) -> float:
    """Return the error rate spent when `fraction` of the information is in (O'Brien-Fleming-like)."""
    return float(2.0 * stats.norm.sf(stats.norm.isf(alpha / 2.0) / math.sqrt(fraction)))


def look_levels(fractions: Sequence[float], alpha: float) -> tuple[float, ...]:
    """Return the one-sided nominal error rate of each look.

    Parameters
    ----------
    fractions : sequence of float
        Information at each look over information at the last: increasing, ending at 1. For contexts of one suite in
        balanced order, contexts at the look over contexts at the last look.
    alpha : float
        One-sided error rate of the whole design.

    Raises
    ------
    UsageError
        If the fractions do not increase to 1 or alpha is out of range.
    """
    times = np.asarray(fractions, dtype=np.float64)
    steps = np.diff(times, prepend=0.0)
    if times.size == 0 or times[-1] != 1.0 or np.any(steps <= 0.0) or not 0.0 < alpha < 0.5:
        raise UsageError(
            f"looks at fractions {list(fractions)} with alpha = {alpha}",
            hint="fractions increase and end at 1, alpha lies in (0, 0.5)",
        )
    levels: list[float] = []
    spent = 0.0
    grid, density = np.zeros(1), np.ones(1)
    for time, step in zip(times, steps, strict=True):
        quota = spend_alpha(float(time), alpha) - spent
        spread = math.sqrt(float(step))

        score = _boundary(grid, density, float(time), spread, quota)
        levels.append(float(stats.norm.sf(score)))
        spent += quota
        edge = score * math.sqrt(float(time))
        grid, density = _walk(grid, density, spread, low=-_GRID_REACH * math.sqrt(float(time)), high=edge)
    return tuple(levels)


def _boundary(grid: np.ndarray, density: np.ndarray, time: float, spread: float, quota: float) -> float:
    """Return the score that a walk, not yet crossed, exceeds at `time` with probability `quota`."""

    def excess(score: float) -> float:
        return float(density @ stats.norm.sf((score * math.sqrt(time) - grid) / spread)) - quota

    return float(optimize.brentq(excess, -_GRID_REACH, 2.0 * _GRID_REACH, xtol=1e-10))


def _walk(
    grid: np.ndarray, density: np.ndarray, spread: float, *, low: float, high: float
) -> tuple[np.ndarray, np.ndarray]:
    """Move the sub-density of walks that have not crossed by one Gaussian step; weights of Simpson's rule included."""
    points = np.linspace(low, high, _GRID_POINTS)
    simpson = np.ones(_GRID_POINTS)
    simpson[1:-1:2], simpson[2:-1:2] = 4.0, 2.0
    simpson *= (high - low) / (3.0 * (_GRID_POINTS - 1))
    step = np.exp(-0.5 * ((points[:, None] - grid[None, :]) / spread) ** 2) / (spread * math.sqrt(2.0 * math.pi))
    moved = step @ density
    return points, moved * simpson
