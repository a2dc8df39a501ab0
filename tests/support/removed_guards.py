"""A pytest plugin that removes one guard of `docs/mistakes.md` before any test is collected.

`pytest -p removed_guards --remove-guard "M12 exl3eval.compare.check_sanity" tests/...`: the test that the table names
for that guard must fail.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import guard_replacements as make
from mistakes_table import resolve

NOTHING = make.gives(None)

# Row and guard -> from the guard to what stands in its place.
REMOVALS: dict[str, Callable[[Any], Any]] = {
    "M1 exl3eval.arm.check_engagement": NOTHING,
    "M2 exl3_kernels.operands.require_primed": NOTHING,
    "M2 exl3eval.engine.lanes.run_batch": make.wraps(make.prefill_only),
    "M3 exl3eval.engine.lanes.threshold_rows": make.gives([1]),
    "M3 exl3eval.gate.evidence._changed_no_launch": make.gives(False),
    "M4 exl3_kernels.linear.exl3_linear": lambda op: op._init_fn,
    "M5 exl3eval.smoke.agreement.compare_continuation": make.wraps(make.compare_anything),
    "M5 exl3eval.smoke.agreement.says_something": make.gives(True),
    "M6 exl3eval.engine.model.check_probe": NOTHING,
    "M6 exl3_kernels.routes.bucket_rows": make.gives(1),
    "M7 exl3eval.transformers_run._scored_arm": make.wraps(make.score_through_the_reference),
    "M7 exl3eval.transformers_run.check_identical_head": NOTHING,
    "M8 exl3eval.engine.model._check_head": NOTHING,
    "M9 exl3eval.score.divergence.measure_divergences": make.wraps(make.top_20_alone),
    "M10 exl3eval.gate.policy.Policy.__post_init__": NOTHING,
    "M11 exl3eval.variant.parse_variant": make.wraps(make.ignore_unknown_keys),
    "M11 exl3eval.vllm_engine.stack.check_findings": NOTHING,
    "M12 exl3eval.compare.check_sanity": NOTHING,
    "M13 exl3eval.arm.arm_contract": make.wraps(make.without_variant),
    "M13 exl3eval.receipt._arm_identity": make.wraps(make.without_declaration),
    "M14 exl3eval.crossrun.list_differences": make.gives([]),
    "M15 exl3eval.engine.lanes.Lane.kv_cache": lambda guard: None,
    "M15 exl3eval.vllm_engine.child.check_effective": NOTHING,
    "M15b exl3eval.crossrun.list_differences": make.wraps(lambda guard, *a, **o: guard(*a, **o)[:1]),
    "M15b exl3eval.report.study._question": make.wraps(lambda guard, run: guard(run) + run.digest),
    "M16 exl3eval.gate.evidence.read_run": make.wraps(make.read_anything),
    "M16 exl3eval.gate.checks.check_one_design": NOTHING,
    "M17 exl3eval.gate.ledger.check_policy_unedited": NOTHING,
    "M17 exl3eval.gate.declaration.find_declaration": make.wraps(make.always_declared),
    "M18 exl3eval.verify.first_difference": NOTHING,
    "M18 exl3eval.verify.read_stored_run": make.gives(({}, {})),
    "M19 exl3eval.engine.capture.read_hidden": make.wraps(make.trust_the_file),
    "M19 exl3eval.records.digest_value": make.gives("0" * 64),
    "M20 exl3eval.checkpoint.load.checkpoint_digest": make.wraps(make.digest_of_the_path),
    "M20 exl3eval.identity.source_digest": make.wraps(make.source_digest_of_the_path),
    "M21 exl3eval.isolation.run_isolated": make.wraps(make.in_this_process),
    "M22 exl3eval.identity.source_digest": make.gives("0" * 64),
    "M22 exl3eval.crossrun.list_differences": make.gives([]),
    "M23 exl3eval.settings.load_settings": make.wraps(make.cache_in_a_temporary_folder),
    "M23 exl3eval.report.reproduce.write_bundle": make.wraps(make.report_alone),
    "M24 exl3eval.records.parse_json": make.wraps(make.lenient_json),
    "M24 exl3eval.records.render_json": make.wraps(make.render_anything),
    "M24 exl3eval.records.write_atomic": make.wraps(make.write_in_place),
    "M25 exl3eval.suite.load._match_rows": NOTHING,
    "M26 exl3eval.report.reproduce.check_bundle": make.gives(""),
    "M27 exl3eval.report.write._write_figures": NOTHING,
    "M28 exl3eval.stats.paired.estimate_paired_difference": make.wraps(make.without_pairing),
    "M29 exl3eval.variant._compose": make.wraps(make.first_part),
    "M30 exl3eval.compare.context_means": make.wraps(make.floor_subtracted),
    "M30 exl3eval.vllm_engine.floor.check_cross_engine": NOTHING,
    "M31 exl3eval.stats.signs.count_signs": make.wraps(make.ties_to_one_side),
    "M32 exl3eval.gate.decide.decide_bounds": make.wraps(make.point_estimate),
    "M33 exl3eval.stats.paired._mde_of": make.gives(0.0),
    "M34 exl3eval.suite.load._match_rows": NOTHING,
    "M35 exl3eval.suite.shingles.CalibrationIndex.count_hits": make.gives(0),
    "M36 exl3eval.suite.shingles.shingle_hashes": make.wraps(make.every_twelfth_offset),
    "M37 exl3eval.suite.context.check_floors": NOTHING,
    "M38 exl3eval.report.study._protocol": make.gives({}),
    "M39 exl3eval.gate.ledger.count_suite_uses": make.gives([]),
    "M39 exl3eval.suite.context.Suite.select": make.wraps(make.sealed_texts_too),
    "M40 exl3eval.stats.tails.pooled_quantile": make.wraps(make.average_of_quantiles),
    "M41 exl3eval.stats.paired.estimate_paired_difference": make.wraps(make.spread_within_one_arm),
    "M42 exl3_kernels.routes.register_route": make.wraps(make.register_over),
    "P1 exl3eval.stats.resample.resample_means": make.wraps(make.spread_over_sqrt_b),
    "P2 exl3eval.gate.decide.decide_bounds": make.wraps(make.not_significant_so_pass),
    "P2 exl3eval.stats.paired.estimate_paired_difference": make.wraps(make.without_pairing),
    "P3 exl3eval.score.divergence.measure_divergences": make.wraps(make.absolute_log_ratios),
    "P4 exl3eval.score.divergence.measure_divergences": make.wraps(make.sorted_values),
    "P4 exl3eval.verify._check_rows": NOTHING,
    "P5 exl3eval.score.scoring.ScoredContext.targets": lambda guard: property(lambda context: guard.fget(context)[:-1]),
    "P5 exl3eval.score.divergence.measure_divergences": make.wraps(make.shorter_vocabulary),
    "P5 exl3eval.engine.vocabulary.check_same_vocabulary": NOTHING,
    "P6 exl3eval.score.divergence.measure_divergences": make.wraps(make.the_other_direction),
    "P7 exl3eval.score.divergence._prepare": make.wraps(make.finite_fp32),
    "P7 exl3eval.kernel_check.oracle.exact_product": make.wraps(make.wide_tolerance),
    "P7 exl3_kernels.codebook.codebook_values": make.wraps(make.one_codebook),
    "P8 exl3eval.gate.llama_kld.LlamaKld.chunk": make.wraps(make.renormalised),
    "P9 exl3eval.stats.intervals._unknown": make.wraps(make.certain),
}


def pytest_addoption(parser) -> None:
    parser.addoption("--remove-guard", choices=list(REMOVALS))


def pytest_configure(config) -> None:
    chosen = config.getoption("--remove-guard")
    if chosen is not None:
        owner, name = resolve(chosen.split(" ")[1])
        setattr(owner, name, REMOVALS[chosen](getattr(owner, name)))
