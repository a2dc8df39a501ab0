"""The suite: which properties there are, and their verdicts on every route of a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from exl3eval.kernel_check import decoding, grouped, guards, launches, mutants, rows, sums
from exl3eval.kernel_check.finding import Evidence, Finding, Skipped, judge
from exl3eval.kernel_check.subject import CONTROLS, Scope, Subject

CODEC = "codec"
CONTROL_CAUGHT = "a broken route is caught"


@dataclass(frozen=True, slots=True, kw_only=True)
class Property:
    """A named check of one route: `check(subject, scope)`; the number is that of `Finding`."""

    number: int
    name: str
    check: Callable[[Subject, Scope], Evidence | Skipped]


PROPERTIES = (
    Property(number=3, name="one-hot decode", check=decoding.one_hot_decode),
    Property(number=4, name="directed bit patterns", check=decoding.directed_patterns),
    Property(number=5, name="every state", check=decoding.every_state),
    Property(number=6, name="row invariance", check=rows.row_invariance),
    Property(number=7, name="tile and threshold edges", check=rows.tile_edges),
    Property(number=8, name="equal routes", check=rows.family_equality),
    Property(number=9, name="wide-range rows", check=rows.wide_range_rows),
    Property(number=10, name="layout equality", check=grouped.layout_equality),
    Property(number=11, name="together and alone", check=grouped.together_and_alone),
    Property(number=12, name="combined and separate", check=grouped.combined_and_separate),
    Property(number=13, name="routing plan", check=grouped.routing_plan),
    Property(number=14, name="fp64 bound", check=sums.error_over_bound),
    Property(number=14, name="relative error", check=sums.relative_error),
    Property(number=14, name="one wrong weight is caught", check=sums.one_wrong_weight),
    Property(number=14, name="experts: relative error", check=grouped.experts_relative_error),
    Property(number=14, name="experts: one wrong weight is caught", check=grouped.experts_wrong_weight),
    Property(number=15, name="other splits", check=sums.other_splits),
    Property(number=16, name="graph replay", check=launches.graph_replay),
    Property(number=16, name="first call in a capture", check=launches.first_call_in_capture),
    Property(number=16, name="experts: graph replay", check=grouped.experts_replay),
    Property(number=17, name="launch contract", check=launches.launch_contract),
    Property(number=18, name="repeats", check=launches.repeats),
    Property(number=18, name="two processes", check=launches.another_process),
    Property(number=19, name="guards", check=guards.guards),
    Property(number=19, name="counters", check=guards.counters),
    Property(number=20, name="types", check=rows.dtype_matrix),
    Property(number=21, name="finite outputs", check=rows.finite_outputs),
    Property(number=22, name="faults are caught", check=mutants.suite_catches_mutants),
    Property(number=23, name="poisoned scratch", check=launches.poisoned_scratch),
    Property(number=23, name="experts without tokens", check=grouped.experts_without_tokens),
    Property(number=24, name="canaries", check=launches.canaries),
    Property(number=25, name="two streams", check=launches.two_streams),
    Property(number=26, name="another device", check=launches.other_device),
    Property(number=27, name="strides and alignment", check=rows.strides_and_alignment),
    Property(number=28, name="wide output", check=guards.wide_output),
    Property(number=28, name="large offsets", check=guards.large_offsets),
)


def run_suite(
    subjects: Sequence[Subject], scope: Scope, device: torch.device, *, upstream: Path | None = None
) -> Iterator[Finding]:
    """Yield every finding: the codec's own properties, every property of every route, then the controls' verdict.

    A property that raises is a finding that failed.
    """
    yield _attempt(1, "decoder equals oracle", CODEC, partial(decoding.decoder_against_oracle, device, scope))
    yield _attempt(2, "oracle equals upstream", CODEC, partial(decoding.oracle_against_upstream, upstream))
    yield _attempt(5, "codebook tables", CODEC, partial(decoding.codebook_tables, device, scope))
    for subject in subjects:
        failed = 0
        for item in PROPERTIES:
            finding = _attempt(item.number, item.name, subject.name, partial(item.check, subject, scope))
            failed += finding.status == "fail"
            yield finding
        if subject.name in CONTROLS:
            evidence = Evidence(
                checked=f"the control fails {failed} of {len(PROPERTIES)} checks",
                cases=1,
                worst=float(failed == 0),
                measure="controls not caught",
            )
            yield judge(22, CONTROL_CAUGHT, subject.name, evidence)


def is_green(findings: Sequence[Finding]) -> bool:
    """Return whether nothing failed but the controls, and every control was caught."""
    return all(f.status != "fail" or (f.route in CONTROLS and f.name != CONTROL_CAUGHT) for f in findings)


def _attempt(number: int, name: str, route: str, check: Callable[[], Evidence | Skipped]) -> Finding:
    try:
        outcome: Evidence | Skipped | Exception = check()
    except Exception as error:  # whatever a route under test raises is its failure
        outcome = error
    return judge(number, name, route, outcome)
