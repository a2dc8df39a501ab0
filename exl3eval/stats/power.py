"""How many contexts a margin needs, and what a design can see: measurement.md section 4, solved three ways.

n = DEFF * ((z_{1-a} + z_{1-b}) * sigma / margin)^2. The figures are for no true difference: the chance that a harmless
change passes. They use the Gaussian form; at 32 contexts of a heavy-tailed difference simulation gives .56 where the
form gives .51.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy import stats

from exl3eval.stats.paired import minimum_detectable_effect


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """What a design can decide about a margin.

    Attributes
    ----------
    num_contexts, num_clusters : int
        n and G that the figures are for.
    sigma : float
        Standard deviation over contexts of the paired difference; 0 for identical arms.
    deff : float
        Design effect of the clusters.
    mde : float
        Smallest true difference seen with probability `target`; 0 for identical arms.
    power : float
        Probability that no true difference passes the margin.
    contexts_needed : int
        n at which `power` reaches `target`.
    """

    num_contexts: int
    num_clusters: int
    sigma: float
    deff: float
    mde: float
    power: float
    contexts_needed: int


def study_power(
    *, sigma: float, deff: float, num_contexts: int, num_clusters: int, margin: float, alpha: float, target: float
) -> Power:
    """Compute power, MDE and contexts needed for a margin.

    Parameters
    ----------
    sigma, deff, num_contexts, num_clusters
        As in `Power`.
    margin : float
        Largest acceptable difference, in the unit of `sigma`; positive.
    alpha : float
        One-sided error rate.
    target : float
        Power wanted.
    """
    if sigma == 0.0:
        return Power(
            num_contexts=num_contexts,
            num_clusters=num_clusters,
            sigma=0.0,
            deff=1.0,
            mde=0.0,
            power=1.0,
            contexts_needed=1,
        )
    z_alpha, z_target = float(stats.norm.isf(alpha)), float(stats.norm.ppf(target))
    se = sigma * math.sqrt(deff / num_contexts)
    return Power(
        num_contexts=num_contexts,
        num_clusters=num_clusters,
        sigma=sigma,
        deff=deff,
        mde=minimum_detectable_effect(sigma=sigma, deff=deff, num_contexts=num_contexts, alpha=alpha, power=target),
        power=float(stats.norm.cdf(margin / se - z_alpha)),
        contexts_needed=math.ceil(deff * ((z_alpha + z_target) * sigma / margin) ** 2),
    )
