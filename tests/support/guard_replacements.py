"""What stands in the place of a guard that `removed_guards` removes: each makes the mistake again.

The first parameter is the guard itself, the others are its own. Nothing of the project is imported before a
replacement is called: whoever imports the guard later must meet the replacement.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any


def gives(value: Any) -> Callable[[Any], Any]:
    """Replace a function by one that returns a value whatever it is given."""
    return lambda guard: lambda *arguments, **options: value


def wraps(change: Callable[..., Any]) -> Callable[[Any], Any]:
    """Replace a function by `change(guard, ...)`."""
    return lambda guard: lambda *arguments, **options: change(guard, *arguments, **options)


def prefill_only(guard, decoder, ids_BT, lane, graph=None):
    first = lane.first_scored(ids_BT.shape[1])
    return guard(decoder, ids_BT, replace(lane, kind="prefill", rows=None, scored=None, graph=False))[:, first:]


def compare_anything(guard, free_S, forced_S, reference_S, reference_logits_SV):
    from exl3eval.smoke.agreement import Continuation

    return Continuation(prefix=0, classes=())


def score_through_the_reference(guard, session, record, heads):
    return guard(session, record, dict.fromkeys(heads, heads["reference"]))


def top_20_alone(guard, logits_ref_TV, logits_arms, targets_T, **options):
    top = logits_ref_TV.topk(min(20, logits_ref_TV.shape[1]), dim=1).indices
    arms = {name: logits.gather(1, top) for name, logits in logits_arms.items()}
    return guard(logits_ref_TV.gather(1, top), arms, targets_T, **options)


def absolute_log_ratios(guard, logits_ref_TV, logits_arms, targets_T, **options):
    log_p = logits_ref_TV.double().log_softmax(dim=1)
    found = guard(logits_ref_TV, logits_arms, targets_T, **options)
    return {
        name: replace(rows, kl=(log_p.exp() * (log_p - logits_arms[name].double().log_softmax(dim=1)).abs()).sum(dim=1))
        for name, rows in found.items()
    }


def sorted_values(guard, logits_ref_TV, logits_arms, targets_T, **options):
    arms = {name: logits.sort(dim=1).values for name, logits in logits_arms.items()}
    return guard(logits_ref_TV.sort(dim=1).values, arms, targets_T, **options)


def the_other_direction(guard, logits_ref_TV, logits_arms, targets_T, **options):
    found = guard(logits_ref_TV, logits_arms, targets_T, **options)
    return {name: replace(rows, kl=rows.kl_reverse, kl_reverse=rows.kl) for name, rows in found.items()}


def shorter_vocabulary(guard, logits_ref_TV, logits_arms, targets_T, **options):
    width = min(logits.shape[1] for logits in (logits_ref_TV, *logits_arms.values()))
    arms = {name: logits[:, :width] for name, logits in logits_arms.items()}
    return guard(logits_ref_TV[:, :width], arms, targets_T, **options)


def finite_fp32(guard, logits_TV, who, vocab_chunk):
    return guard(logits_TV.float().nan_to_num(), who, vocab_chunk)


def ignore_unknown_keys(guard, text, *, where):
    import tomllib
    from dataclasses import fields

    from exl3eval.variant import Variant

    known = {field.name for field in fields(Variant)}
    table = {key: value for key, value in tomllib.loads(text).items() if key in known}
    return Variant(**{"embedding": "stored"} | table)


def register_over(guard, route):
    from exl3_kernels.routes import ROUTES

    ROUTES[route.name] = route
    return route


def without_variant(guard, spec, **options):
    return {key: value for key, value in guard(spec, **options).items() if key != "variant"}


def without_declaration(guard, record):
    return guard(record) | {"declared": {}, "resolved": {}}


def read_anything(guard, folder):
    from exl3eval.gate.evidence import _check_run
    from exl3eval.verify import read_stored_run

    return _check_run(*read_stored_run(folder))


def always_declared(guard, policy, receipt, **options):
    from exl3eval.gate.declaration import Declaration

    return Declaration(witness="package", since=None)


def trust_the_file(guard, path):
    from safetensors import safe_open

    from exl3eval.engine.capture import Launch, json

    if not path.exists():
        return None
    with safe_open(path, framework="pt") as file:
        hidden, metadata = file.get_tensor("hidden"), file.metadata()
    return hidden, {Launch(*key): count for key, count in json.loads(metadata["launches"])}


def digest_of_the_path(guard, checkpoint, **options):
    return str(checkpoint.directory)


def source_digest_of_the_path(guard, package):
    from importlib.resources import files

    return str(files(package))


def in_this_process(guard, work, task, reporter, *, label):
    return work(task, reporter)


def cache_in_a_temporary_folder(guard):
    import tempfile
    from pathlib import Path

    return replace(guard(), cache_dir=Path(tempfile.gettempdir()) / "exl3eval")


def report_alone(guard, study, document, folder):
    from exl3eval.records import write_json
    from exl3eval.report.reproduce import REPORT_FILE, report_json

    write_json(folder / REPORT_FILE, report_json(study, document))


def lenient_json(guard, text, *, where):
    import json

    return json.loads(text)


def render_anything(guard, value):
    import json

    return json.dumps(value)


def write_in_place(guard, path, content, *, exclusive=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def without_pairing(guard, baseline, variant, **options):
    return guard(baseline, variant.replace_values(variant.values[::-1]), **options)


def first_part(guard, parts):
    return parts[0]


def floor_subtracted(guard, rows, measure):
    sample = guard(rows, measure)
    return sample.replace_values(sample.values - sample.values.min()) if measure == "kl" else sample


def ties_to_one_side(guard, differences):
    from exl3eval.stats.signs import WinsTiesLosses

    wins = int((differences < 0).sum())
    return WinsTiesLosses(wins=wins, ties=0, losses=len(differences) - wins)


def point_estimate(guard, lower, upper, margin, mode):
    from exl3eval.gate.verdict import Outcome

    return Outcome.PASS if lower is None or (lower + upper) / 2 < margin else Outcome.FAIL


def not_significant_so_pass(guard, lower, upper, margin, mode):
    from exl3eval.gate.verdict import Outcome

    return Outcome.PASS if lower is None or lower <= 0.0 <= upper else Outcome.FAIL


def every_twelfth_offset(guard, text):
    import numpy as np

    from exl3eval.suite.shingles import shingle_tokens

    tokens = shingle_tokens(text)
    parts = [guard(" ".join(tokens[at : at + 12])) for at in range(0, len(tokens) - 11, 12)]
    return np.unique(np.concatenate(parts)) if parts else guard("")


def sealed_texts_too(guard, suite, split="analysis", num_contexts=None, seed=0):
    return (*suite.contexts, *suite.sealed)[:num_contexts]


def average_of_quantiles(guard, sorted_P, permille):
    parts = [sorted_P[start::10] for start in range(9)] + [sorted_P[: len(sorted_P) // 2]]
    return sum(guard(part, permille) for part in parts[-2:]) / 2


def spread_within_one_arm(guard, baseline, variant, **options):
    from exl3eval.stats.paired import minimum_detectable_effect

    within = minimum_detectable_effect(sigma=baseline.sd(), deff=1.0, num_contexts=baseline.num_contexts)
    return replace(guard(baseline, variant, **options), mde=within)


def spread_over_sqrt_b(guard, samples, *, num_resamples, **options):
    found = guard(samples, num_resamples=num_resamples, **options)
    means = found.means_BA.mean(axis=0)
    return replace(found, means_BA=means + (found.means_BA - means) / math.sqrt(num_resamples))


def certain(guard, sample, confidence, why):
    from exl3eval.stats.intervals import Interval

    mean = sample.mean()
    point = Interval(low=mean, high=mean)
    return replace(
        guard(sample, confidence, why), se=0.0, interval=point, lower_bound=mean, upper_bound=mean, cluster_t=point
    )


def renormalised(guard, file, index):
    import numpy as np

    raw = file.codes[index]
    step_R, floor_R = raw[:, :4].copy().view("<f4").astype(np.float64).T
    log_RV = floor_R[:, None] + step_R[:, None] * raw[:, 4 : 4 + file.n_vocab].astype(np.float64)
    log_RV -= np.log(np.exp(log_RV).sum(axis=1, keepdims=True))
    return log_RV, np.ones(log_RV.shape, dtype=bool)


def one_codebook(guard, codebook, multiplier=None, **options):
    return guard("mcg", None, **options)


def wide_tolerance(guard, x, weight, arithmetic):
    exact = guard(x, weight, arithmetic)
    return replace(exact, bound=exact.bound.clamp_min(0.05))
