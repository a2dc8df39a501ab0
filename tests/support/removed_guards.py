"""Guards of `docs/mistakes.md`, each with what stands in its place when it is removed and the test that must then fail.

As a pytest plugin (`-p removed_guards --remove-guard "M12 exl3eval.compare.check_sanity"`) it removes one guard before
any test is collected. Nothing of the project is imported before that, so that every importer meets the replacement.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """One guard removed.

    Parameters
    ----------
    row : str
        Of the table in `docs/mistakes.md`.
    guard : str
        Dotted name.
    instead : callable
        From the guard to what takes its place.
    test : str
        Node id of the test that must fail.
    """

    row: str
    guard: str
    instead: Callable[[Any], Any]
    test: str

    @property
    def name(self) -> str:
        return f"{self.row} {self.guard}"


def resolve(dotted: str) -> tuple[Any, str]:
    """Return the module or class that holds a dotted name, and the name's last part.

    Raises
    ------
    ImportError, AttributeError
        If there is no such name.
    """
    parts = dotted.split(".")
    for size in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:size])
        try:
            owner: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            continue
        for part in parts[size:-1]:
            owner = getattr(owner, part)
        getattr(owner, parts[-1])
        return owner, parts[-1]
    raise ImportError(f"no module of {dotted} can be imported")


def gives(value: Any) -> Callable[[Any], Any]:
    """Replace a function by one that returns a value whatever it is given."""
    return lambda guard: lambda *arguments, **options: value


def wraps(change: Callable[..., Any]) -> Callable[[Any], Any]:
    """Replace a function by `change(guard, ...)`."""
    return lambda guard: lambda *arguments, **options: change(guard, *arguments, **options)


def _prefill_only(guard, decoder, ids_BT, lane, graph=None):
    first = lane.first_scored(ids_BT.shape[1])
    return guard(decoder, ids_BT, replace(lane, kind="prefill", rows=None, scored=None, graph=False))[:, first:]


def _compare_anything(guard, free_S, forced_S, reference_S, reference_logits_SV):
    from exl3eval.smoke.agreement import Continuation

    return Continuation(prefix=0, classes=())


def _score_through_the_reference(guard, session, record, heads):
    return guard(session, record, dict.fromkeys(heads, heads["reference"]))


def _top_20_alone(guard, logits_ref_TV, logits_arms, targets_T, **options):
    top = logits_ref_TV.topk(min(20, logits_ref_TV.shape[1]), dim=1).indices
    arms = {name: logits.gather(1, top) for name, logits in logits_arms.items()}
    return guard(logits_ref_TV.gather(1, top), arms, targets_T, **options)


def _absolute_log_ratios(guard, logits_ref_TV, logits_arms, targets_T, **options):
    log_p = logits_ref_TV.double().log_softmax(dim=1)
    found = guard(logits_ref_TV, logits_arms, targets_T, **options)
    return {
        name: replace(rows, kl=(log_p.exp() * (log_p - logits_arms[name].double().log_softmax(dim=1)).abs()).sum(dim=1))
        for name, rows in found.items()
    }


def _sorted_values(guard, logits_ref_TV, logits_arms, targets_T, **options):
    arms = {name: logits.sort(dim=1).values for name, logits in logits_arms.items()}
    return guard(logits_ref_TV.sort(dim=1).values, arms, targets_T, **options)


def _the_other_direction(guard, logits_ref_TV, logits_arms, targets_T, **options):
    found = guard(logits_ref_TV, logits_arms, targets_T, **options)
    return {name: replace(rows, kl=rows.kl_reverse, kl_reverse=rows.kl) for name, rows in found.items()}


def _shorter_vocabulary(guard, logits_ref_TV, logits_arms, targets_T, **options):
    width = min(logits.shape[1] for logits in (logits_ref_TV, *logits_arms.values()))
    arms = {name: logits[:, :width] for name, logits in logits_arms.items()}
    return guard(logits_ref_TV[:, :width], arms, targets_T, **options)


def _finite_fp32(guard, logits_TV, who, vocab_chunk):
    return guard(logits_TV.float().nan_to_num(), who, vocab_chunk)


def _ignore_unknown_keys(guard, text, *, where):
    import tomllib
    from dataclasses import fields

    from exl3eval.variant import Variant

    known = {field.name for field in fields(Variant)}
    table = {key: value for key, value in tomllib.loads(text).items() if key in known}
    return Variant(**{"embedding": "stored"} | table)


def _register_over(guard, route):
    from exl3_kernels.routes import ROUTES

    ROUTES[route.name] = route
    return route


def _without_variant(guard, spec, **options):
    return {key: value for key, value in guard(spec, **options).items() if key != "variant"}


def _without_declaration(guard, record):
    return guard(record) | {"declared": {}, "resolved": {}}


def _read_anything(guard, folder):
    from exl3eval.gate.evidence import _check_run
    from exl3eval.verify import read_stored_run

    return _check_run(*read_stored_run(folder))


def _always_declared(guard, policy, receipt, **options):
    from exl3eval.gate.declaration import Declaration

    return Declaration(witness="package", since=None)


def _trust_the_file(guard, path):
    from safetensors import safe_open

    from exl3eval.engine.capture import Launch, json

    if not path.exists():
        return None
    with safe_open(path, framework="pt") as file:
        hidden, metadata = file.get_tensor("hidden"), file.metadata()
    return hidden, {Launch(*key): count for key, count in json.loads(metadata["launches"])}


def _digest_of_the_path(guard, checkpoint, **options):
    return str(checkpoint.directory)


def _source_digest_of_the_path(guard, package):
    from importlib.resources import files

    return str(files(package))


def _in_this_process(guard, work, task, reporter, *, label):
    return work(task, reporter)


def _cache_in_a_temporary_folder(guard):
    import tempfile
    from pathlib import Path

    return replace(guard(), cache_dir=Path(tempfile.gettempdir()) / "exl3eval")


def _report_alone(guard, study, document, folder):
    from exl3eval.records import write_json
    from exl3eval.report.reproduce import REPORT_FILE, report_json

    write_json(folder / REPORT_FILE, report_json(study, document))


def _lenient_json(guard, text, *, where):
    import json

    return json.loads(text)


def _render_anything(guard, value):
    import json

    return json.dumps(value)


def _write_in_place(guard, path, content, *, exclusive=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def _without_pairing(guard, baseline, variant, **options):
    return guard(baseline, variant.replace_values(variant.values[::-1]), **options)


def _first_part(guard, parts):
    return parts[0]


def _floor_subtracted(guard, rows, measure):
    sample = guard(rows, measure)
    return sample.replace_values(sample.values - sample.values.min()) if measure == "kl" else sample


def _ties_to_one_side(guard, differences):
    from exl3eval.stats.signs import WinsTiesLosses

    wins = int((differences < 0).sum())
    return WinsTiesLosses(wins=wins, ties=0, losses=len(differences) - wins)


def _point_estimate(guard, lower, upper, margin, mode):
    from exl3eval.gate.verdict import Outcome

    return Outcome.PASS if lower is None or (lower + upper) / 2 < margin else Outcome.FAIL


def _not_significant_so_pass(guard, lower, upper, margin, mode):
    from exl3eval.gate.verdict import Outcome

    return Outcome.PASS if lower is None or lower <= 0.0 <= upper else Outcome.FAIL


def _every_twelfth_offset(guard, text):
    import numpy as np

    from exl3eval.suite.shingles import shingle_tokens

    tokens = shingle_tokens(text)
    parts = [guard(" ".join(tokens[at : at + 12])) for at in range(0, len(tokens) - 11, 12)]
    return np.unique(np.concatenate(parts)) if parts else guard("")


def _sealed_texts_too(guard, suite, split="analysis", num_contexts=None, seed=0):
    return (*suite.contexts, *suite.sealed)[:num_contexts]


def _average_of_quantiles(guard, sorted_P, permille):
    parts = [sorted_P[start::10] for start in range(9)] + [sorted_P[: len(sorted_P) // 2]]
    return sum(guard(part, permille) for part in parts[-2:]) / 2


def _spread_within_one_arm(guard, baseline, variant, **options):
    from exl3eval.stats.paired import minimum_detectable_effect

    within = minimum_detectable_effect(sigma=baseline.sd(), deff=1.0, num_contexts=baseline.num_contexts)
    return replace(guard(baseline, variant, **options), mde=within)


def _spread_over_sqrt_b(guard, samples, *, num_resamples, **options):
    found = guard(samples, num_resamples=num_resamples, **options)
    means = found.means_BA.mean(axis=0)
    return replace(found, means_BA=means + (found.means_BA - means) / math.sqrt(num_resamples))


def _certain(guard, sample, confidence, why):
    from exl3eval.stats.intervals import Interval

    mean = sample.mean()
    point = Interval(low=mean, high=mean)
    return replace(
        guard(sample, confidence, why), se=0.0, interval=point, lower_bound=mean, upper_bound=mean, cluster_t=point
    )


def _renormalised(guard, file, index):
    import numpy as np

    raw = file.codes[index]
    step_R, floor_R = raw[:, :4].copy().view("<f4").astype(np.float64).T
    log_RV = floor_R[:, None] + step_R[:, None] * raw[:, 4 : 4 + file.n_vocab].astype(np.float64)
    log_RV -= np.log(np.exp(log_RV).sum(axis=1, keepdims=True))
    return log_RV, np.ones(log_RV.shape, dtype=bool)


def _one_codebook(guard, codebook, multiplier=None, **options):
    return guard("mcg", None, **options)


def _wide_tolerance(guard, x, weight, arithmetic):
    exact = guard(x, weight, arithmetic)
    return replace(exact, bound=exact.bound.clamp_min(0.05))


MEASURED, IDENTITY = "tests/mistakes/test_measured.py", "tests/mistakes/test_identity.py"
STATISTICS, PEERS = "tests/mistakes/test_statistics.py", "tests/mistakes/test_peers.py"
_NOTHING = gives(None)
_TABLE: tuple[tuple[str, str, Callable[[Any], Any], str], ...] = (
    ("M1", "exl3eval.arm.check_engagement", _NOTHING, f"{MEASURED}::test_a_claim_about_a_route_with_no_launches_is_invalid"),
    ("M2", "exl3_kernels.operands.require_primed", _NOTHING, f"{MEASURED}::test_every_kind_of_launch_is_primed_on_its_own"),
    ("M2", "exl3eval.engine.lanes.run_batch", wraps(_prefill_only), "tests/engine/test_lanes.py::test_decode_linears_see_exactly_m_rows"),
    ("M3", "exl3eval.engine.lanes.threshold_rows", gives([1]), "tests/engine/test_lanes.py::test_rows_reach_both_sides_of_every_threshold"),
    ("M4", "exl3_kernels.linear.exl3_linear", lambda op: op._init_fn, "tests/codec/test_routes.py::test_the_op_is_opaque_to_tracing_and_keeps_its_branch"),
    ("M5", "exl3eval.smoke.agreement.compare_continuation", wraps(_compare_anything), "tests/smoke/test_agreement.py::test_empty_outputs_are_no_evidence"),
    ("M5", "exl3eval.smoke.agreement.says_something", gives(True), "tests/smoke/test_agreement.py::test_one_id_repeated_says_nothing"),
    ("M6", "exl3eval.engine.model.check_probe", _NOTHING, "tests/test_arm.py::test_a_probe_that_says_nothing_is_invalid"),
    ("M6", "exl3_kernels.routes.bucket_rows", gives(1), "tests/codec/test_routes.py::test_launches_are_counted_by_route_rows_shape_bits_and_codebook"),
    ("M7", "exl3eval.run._Session._scored_arm", wraps(_score_through_the_reference), f"{MEASURED}::test_every_arm_is_scored_through_the_head_that_it_serves"),
    ("M7", "exl3eval.run.check_identical_head", _NOTHING, f"{MEASURED}::test_equal_heads_must_read_exactly_alike_in_both_head_lanes"),
    ("M8", "exl3eval.engine.model._check_head", _NOTHING, "tests/engine/test_placement.py::test_a_model_that_changes_its_logits_after_the_head_is_refused"),
    ("M9", "exl3eval.score.divergence.measure_divergences", wraps(_top_20_alone), f"{MEASURED}::test_a_renormalised_top_20_bounds_nothing_and_is_not_what_is_measured"),
    ("M10", "exl3eval.gate.policy.Policy.__post_init__", _NOTHING, f"{MEASURED}::test_a_proxy_may_rise_where_the_divergence_falls_and_is_no_endpoint"),
    ("M11", "exl3eval.variant.parse_variant", wraps(_ignore_unknown_keys), "tests/test_variant.py::test_malformed_files_say_what_is_wrong"),
    ("M11", "exl3eval.vllm_engine.stack.check_findings", _NOTHING, "tests/vllm/test_engine_parts.py::test_evidence_that_is_not_seen_invalidates_the_arm"),
    ("M12", "exl3eval.compare.check_sanity", _NOTHING, f"{MEASURED}::test_a_broken_model_is_no_data_point"),
    ("M13", "exl3eval.arm.arm_contract", wraps(_without_variant), f"{IDENTITY}::test_every_field_of_a_variant_is_in_the_capture_and_in_the_receipt"),
    ("M13", "exl3eval.receipt._arm_identity", wraps(_without_declaration), f"{IDENTITY}::test_every_field_of_a_variant_is_in_the_capture_and_in_the_receipt"),
    ("M14", "exl3eval.crossrun.list_differences", gives([]), f"{IDENTITY}::test_runs_with_other_caches_are_not_compared"),
    ("M15", "exl3eval.engine.lanes.Lane.kv_cache", lambda guard: None, f"{IDENTITY}::test_a_run_says_what_its_cache_is_kept_in"),
    ("M15b", "exl3eval.crossrun.list_differences", wraps(lambda guard, *a, **o: guard(*a, **o)[:1]), f"{IDENTITY}::test_every_factor_that_moved_is_named"),
    ("M15b", "exl3eval.report.study._question", wraps(lambda guard, run: uuid4().hex), "tests/report/test_study.py::test_a_later_answer_to_the_same_question_makes_an_erratum"),
    ("M16", "exl3eval.gate.evidence.read_run", wraps(_read_anything), "tests/gate/test_evidence.py::test_foreign_evidence_is_never_gated"),
    ("M16", "exl3eval.gate.checks.check_one_design", _NOTHING, "tests/gate/test_evidence.py::test_several_variants_must_share_everything_but_the_variant"),
    ("M17", "exl3eval.gate.ledger.check_policy_unedited", _NOTHING, "tests/gate/test_judge.py::test_a_policy_edited_after_it_judged_a_run_is_found"),
    ("M17", "exl3eval.gate.declaration.find_declaration", wraps(_always_declared), "tests/gate/test_judge.py::test_a_policy_first_seen_after_the_run_decides_nothing"),
    ("M18", "exl3eval.verify.first_difference", _NOTHING, "tests/test_verify.py::test_positions_changed_together_with_their_digest_do_not_fit_the_results"),
    ("M18", "exl3eval.verify.read_stored_run", gives(({}, {})), f"{IDENTITY}::test_a_receipt_without_its_positions_is_not_read"),
    ("M19", "exl3eval.engine.capture._read_context", wraps(_trust_the_file), "tests/engine/test_capture.py::test_a_damaged_context_is_made_again"),
    ("M19", "exl3eval.records.digest_value", gives("0" * 64), "tests/engine/test_capture.py::test_another_contract_never_reuses"),
    ("M20", "exl3eval.checkpoint.load.checkpoint_digest", wraps(_digest_of_the_path), "tests/checkpoint/test_open.py::test_the_digest_ignores_layout"),
    ("M20", "exl3eval.identity.source_digest", wraps(_source_digest_of_the_path), f"{IDENTITY}::test_sources_have_one_digest_in_any_place_and_another_after_any_edit"),
    ("M21", "exl3eval.isolation.run_isolated", wraps(_in_this_process), "tests/test_isolation.py::test_a_process_meets_nothing_of_another"),
    ("M22", "exl3eval.identity.source_digest", gives("0" * 64), f"{IDENTITY}::test_sources_have_one_digest_in_any_place_and_another_after_any_edit"),
    ("M22", "exl3eval.crossrun.list_differences", gives([]), f"{IDENTITY}::test_runs_of_other_sources_are_not_compared"),
    ("M23", "exl3eval.settings.load_settings", wraps(_cache_in_a_temporary_folder), f"{IDENTITY}::test_captures_outlive_a_reboot"),
    ("M23", "exl3eval.report.reproduce.write_bundle", wraps(_report_alone), f"{IDENTITY}::test_a_report_carries_the_positions_it_rests_on"),
    ("M24", "exl3eval.records.parse_json", wraps(_lenient_json), "tests/test_records.py::test_reading_refuses_what_is_not_strict"),
    ("M24", "exl3eval.records.render_json", wraps(_render_anything), "tests/test_records.py::test_non_finite_floats_never_reach_a_file"),
    ("M24", "exl3eval.records.write_atomic", wraps(_write_in_place), "tests/test_records.py::test_a_failed_write_leaves_the_old_file"),
    ("M25", "exl3eval.suite.load._match_rows", _NOTHING, "tests/suite/test_build.py::test_each_alteration_is_an_error"),
    ("M26", "exl3eval.report.reproduce.check_bundle", gives(""), f"{IDENTITY}::test_no_number_of_a_report_can_be_typed_by_hand"),
    ("M27", "exl3eval.report.write._write_figures", _NOTHING, "tests/report/test_write.py::test_every_figure_that_markdown_names_exists"),
    ("M28", "exl3eval.stats.paired.estimate_paired_difference", wraps(_without_pairing), f"{STATISTICS}::test_intervals_that_overlap_hide_a_difference_that_the_pairs_show"),
    ("M29", "exl3eval.variant._compose", wraps(_first_part), f"{STATISTICS}::test_two_changes_together_are_an_arm_of_their_own_not_a_sum"),
    ("M30", "exl3eval.compare.context_means", wraps(_floor_subtracted), f"{STATISTICS}::test_a_floor_stands_beside_a_divergence_and_is_never_taken_off"),
    ("M30", "exl3eval.vllm_engine.floor.check_cross_engine", _NOTHING, "tests/vllm/test_engine_parts.py::test_differences_across_engines_need_a_floor_below_them"),
    ("M31", "exl3eval.stats.signs.count_signs", wraps(_ties_to_one_side), f"{STATISTICS}::test_ties_are_nobodys_wins"),
    ("M32", "exl3eval.gate.decide.decide_bounds", wraps(_point_estimate), f"{STATISTICS}::test_a_mean_below_the_threshold_with_a_bound_above_it_is_no_pass"),
    ("M33", "exl3eval.stats.paired._mde_of", gives(0.0), f"{STATISTICS}::test_a_repeat_that_agrees_measures_no_error"),
    ("M34", "exl3eval.suite.load._match_rows", _NOTHING, "tests/suite/test_build.py::test_a_cluster_lies_in_one_split"),
    ("M35", "exl3eval.suite.shingles.CalibrationIndex.count_hits", gives(0), "tests/suite/test_build.py::test_verify_scans_the_texts_again"),
    ("M36", "exl3eval.suite.shingles.shingle_hashes", wraps(_every_twelfth_offset), "tests/suite/test_shingles.py::test_an_excerpt_is_caught_at_every_offset"),
    ("M37", "exl3eval.suite.context.check_floors", _NOTHING, "tests/suite/test_build.py::test_each_alteration_is_an_error"),
    ("M38", "exl3eval.report.study._protocol", gives({}), "tests/report/test_study.py::test_mixing_protocols_is_an_error_that_names_the_field"),
    ("M39", "exl3eval.gate.ledger.count_suite_uses", gives([]), "tests/gate/test_judge.py::test_history_filters_and_counts_decisions"),
    ("M39", "exl3eval.suite.context.Suite.select", wraps(_sealed_texts_too), "tests/suite/test_shipped.py::test_the_sealed_split_opens_only_by_name"),
    ("M40", "exl3eval.stats.tails.pooled_quantile", wraps(_average_of_quantiles), f"{STATISTICS}::test_the_worst_percent_is_of_all_positions_pooled"),
    ("M41", "exl3eval.stats.paired.estimate_paired_difference", wraps(_spread_within_one_arm), f"{STATISTICS}::test_power_comes_from_the_spread_of_the_pairs"),
    ("M42", "exl3_kernels.routes.register_route", wraps(_register_over), "tests/codec/test_routes.py::test_route_names_are_unique"),
    ("P1", "exl3eval.stats.resample.resample_means", wraps(_spread_over_sqrt_b), f"{STATISTICS}::test_the_spread_of_resampled_means_is_the_standard_error_as_it_is"),
    ("P2", "exl3eval.gate.decide.decide_bounds", wraps(_not_significant_so_pass), f"{STATISTICS}::test_a_difference_that_an_unpaired_z_ticks_is_failed_by_its_bound"),
    ("P2", "exl3eval.stats.paired.estimate_paired_difference", wraps(_without_pairing), f"{STATISTICS}::test_a_difference_that_an_unpaired_z_ticks_is_failed_by_its_bound"),
    ("P3", "exl3eval.score.divergence.measure_divergences", wraps(_absolute_log_ratios), f"{PEERS}::test_a_sum_of_absolute_log_ratios_is_no_divergence"),
    ("P4", "exl3eval.score.divergence.measure_divergences", wraps(_sorted_values), f"{PEERS}::test_sorted_values_without_ids_agree_while_every_id_is_wrong"),
    ("P4", "exl3eval.verify._check_rows", _NOTHING, "tests/test_verify.py::test_a_number_that_the_positions_do_not_give_is_refused_even_with_new_digests"),
    ("P5", "exl3eval.score.scoring.ScoredContext.targets", lambda guard: property(lambda context: guard.fget(context)[:-1]), f"{PEERS}::test_every_position_up_to_the_last_has_a_target"),
    ("P5", "exl3eval.score.divergence.measure_divergences", wraps(_shorter_vocabulary), f"{PEERS}::test_the_smaller_vocabulary_is_not_what_is_left_to_compare"),
    ("P5", "exl3eval.engine.vocabulary.check_same_vocabulary", _NOTHING, f"{PEERS}::test_the_smaller_vocabulary_is_not_what_is_left_to_compare"),
    ("P6", "exl3eval.score.divergence.measure_divergences", wraps(_the_other_direction), f"{PEERS}::test_the_headline_is_the_divergence_from_the_reference_to_the_arm"),
    ("P7", "exl3eval.score.divergence._prepare", wraps(_finite_fp32), f"{PEERS}::test_masks_half_precision_and_lost_positions_are_told_apart"),
    ("P7", "exl3eval.kernel_check.oracle.exact_product", wraps(_wide_tolerance), f"{PEERS}::test_a_tolerance_of_0_05_passes_a_wrong_kernel"),
    ("P7", "exl3_kernels.codebook.codebook_values", wraps(_one_codebook), "tests/codec/test_golden.py::test_swapped_codebooks_are_caught"),
    ("P8", "exl3eval.gate.llama_kld.LlamaKld.chunk", wraps(_renormalised), f"{PEERS}::test_a_file_that_ends_16_nats_down_is_not_filled_up"),
    ("P9", "exl3eval.stats.intervals._unknown", wraps(_certain), f"{STATISTICS}::test_one_cluster_has_no_standard_error"),
)  # fmt: skip
REMOVALS = tuple(Removal(row=row, guard=guard, instead=instead, test=test) for row, guard, instead, test in _TABLE)


def pytest_addoption(parser) -> None:
    parser.addoption("--remove-guard", choices=[removal.name for removal in REMOVALS])


def pytest_configure(config) -> None:
    chosen = config.getoption("--remove-guard")
    for removal in REMOVALS:
        if removal.name == chosen:
            owner, name = resolve(removal.guard)
            setattr(owner, name, removal.instead(getattr(owner, name)))
