"""Designing a gate from a stored run: what each margin is, what it costs to decide, and what a size can see."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import asdict
from typing import Any

from exl3eval.gate.endpoints import UNITS, endpoint_value, estimate_deltas
from exl3eval.gate.policy import MarginRule, Policy
from exl3eval.gate.rows import Run
from exl3eval.gate.verdict import resolve_margin
from exl3eval.stats.power import study_power

SCHEMA = "exl3eval/power/1"
SIZES = (32, 64, 96, 136)


def study_design(
    run: Run,
    policy: Policy,
    *,
    sizes: Sequence[int] = SIZES,
    mean_margin: float | None = None,
    executor: Executor | None = None,
) -> dict[str, Any]:
    """Tabulate power and MDE over sizes for every endpoint of a policy, from a run's paired variance.

    Parameters
    ----------
    run : Run
        A stored run of a similar change.
    policy : Policy
    sizes : sequence of int
        Numbers of contexts.
    mean_margin : float, optional
        In nats, in place of the policy's margin of `mean`.
    executor : Executor, optional
        Threads for resampling.

    Returns
    -------
    dict
        Strict JSON. `sigma_d` and `deff` are None, with the reason in `why`, where the spread is unknown.
    """
    deltas = estimate_deltas(
        run.baseline,
        [run.variant],
        list(policy.margins),
        confidence=1.0 - policy.alpha,
        num_resamples=policy.num_resamples,
        seed=policy.seed,
        executor=executor,
    )
    rows = []
    for delta in deltas:
        rule = policy.margins[delta.endpoint]
        if delta.endpoint == "mean" and mean_margin is not None:
            rule = MarginRule(absolute=mean_margin)
        margin = resolve_margin(rule, baseline=delta.baseline, floor=endpoint_value(run.floor, delta.endpoint))
        studies = [
            study_power(
                sigma=delta.sigma,
                deff=delta.deff or 1.0,
                num_contexts=size,
                num_clusters=delta.num_clusters,
                margin=margin.value,
                alpha=policy.alpha,
                target=policy.min_power,
            )
            for size in sizes
            if delta.sigma is not None
        ]
        rows.append(
            {
                "endpoint": delta.endpoint,
                "unit": UNITS[delta.endpoint],
                "margin": asdict(margin),
                "sigma_d": delta.sigma,
                "deff": delta.deff,
                "contexts_needed": studies[0].contexts_needed if studies else None,
                "sizes": [{"n": s.num_contexts, "mde": s.mde, "power": s.power} for s in studies],
                "why": delta.why,
            }
        )
    return {
        "schema": SCHEMA,
        "policy": {"name": policy.name, "digest": policy.digest},
        "baseline": run.baseline.arm,
        "variant": run.variant.arm,
        "num_contexts": run.baseline.num_contexts,
        "num_clusters": len(set(run.baseline.clusters)),
        "target_power": policy.min_power,
        "endpoints": rows,
    }
