"""The main job: contexts -> arms -> positions -> comparison -> receipt.

Arms of one run: the reference; the reference again at the other precision (its own rounding floor); outside prefill
the reference in the lanes under test (what a lane itself moves); the baseline variant; and the variant. Each arm runs
in a process of its own. Everything that can be refused is refused before a model is loaded.
"""

from __future__ import annotations

import torch

from exl3_kernels.dispatch import measured_on
from exl3eval.arm import ArmSpec
from exl3eval.checkpoint.directory import Checkpoint
from exl3eval.checkpoint.load import checkpoint_digest
from exl3eval.engine.device import pin_arithmetic, resolve_device
from exl3eval.engine.placement import check_routes
from exl3eval.engine.vocabulary import check_same_vocabulary, read_vocabulary
from exl3eval.identity import code_identity, device_identity
from exl3eval.isolation import start_server
from exl3eval.online import quantize_at_load
from exl3eval.progress import Reporter
from exl3eval.request import (
    PREFILL,
    REFERENCE,
    TRANSFORMERS,
    VLLM,
    KldRequest,
    candidate_lanes,
    candidate_names,
    check_engine,
    check_lanes,
    check_request,
    floor_name,
    floor_precision,
    open_models,
    reference_variant,
)
from exl3eval.session import KldRun, Session
from exl3eval.settings import Settings
from exl3eval.suite.load import load_suite
from exl3eval.suite.tokens import tokenize_suite
from exl3eval.transformers_run import run_arms
from exl3eval.variant import NO_QUANTIZING, load_variant, resolve_variant
from exl3eval.vllm_engine.run import find_interpreters, run_vllm


def run_kld(request: KldRequest, *, settings: Settings, reporter: Reporter) -> list[KldRun]:
    """Measure a variant against its baseline and the reference, lane by lane.

    Parameters
    ----------
    request : KldRequest
        What to measure.
    settings : Settings
        The cache, from which a killed run continues; threads; the interpreter of arms under vLLM.
    reporter : Reporter
        Told about progress.

    Returns
    -------
    list of KldRun
        One per lane, in the order asked for.

    Raises
    ------
    UsageError, CheckpointError, SuiteError
        Before any model is loaded, if anything asked for does not exist or does not fit.
    InvalidRunError
        If an arm ran but its result must not be read as a number.
    """
    check_request(request)
    torch.set_num_threads(settings.num_threads)
    pin_arithmetic()
    device = resolve_device(request.device)
    if request.engine == TRANSFORMERS:
        start_server()
    variants = {name: load_variant(name) for name in dict.fromkeys((request.baseline, request.variant))}
    measured = measured_on(device)
    resolved = {name: resolve_variant(variant, device.type, measured=measured) for name, variant in variants.items()}
    check_lanes(request, variants.values())
    check_engine(request, variants.values(), device.type)
    model, reference = open_models(request)
    for variant in resolved.values():
        check_routes(model, variant.linear, device)
    vocabulary = read_vocabulary(reference.directory)
    check_same_vocabulary(vocabulary, read_vocabulary(model.directory))
    suite = load_suite(request.suite)
    tokens = tokenize_suite(
        suite,
        reference.directory,
        split=request.split,
        num_contexts=request.num_contexts,
        num_tokens=request.num_positions + 1,
        seed=request.seed,
        cache_dir=settings.cache_dir,
    )
    interpreters = find_interpreters(variants.values(), settings.vllm_python) if request.engine == VLLM else None
    model_sha = _digest_checkpoint(model, "model", reporter)
    reference_sha = _digest_checkpoint(reference, "reference", reporter)
    under_test = list(dict.fromkeys(lane for v in variants.values() for lane in candidate_lanes(request.lanes, v)))
    references = {
        REFERENCE: (request.reference_precision, (PREFILL, *(lane for lane in under_test if lane != PREFILL))),
        floor_name(request): (floor_precision(request), (PREFILL,)),
    }
    checkpoints = dict.fromkeys(variants, (model, model_sha))
    for name, variant in resolved.items():
        if variant.quantize != NO_QUANTIZING:
            made = quantize_at_load(
                reference,
                reference_sha,
                variant.quantize,
                seed=request.seed,
                device=device,
                cache_dir=settings.cache_dir,
                num_threads=settings.num_threads,
                reporter=reporter,
            )
            check_routes(made, variant.linear, device)
            checkpoints[name] = made, _digest_checkpoint(made, name, reporter)
    specs = [
        *(
            ArmSpec(
                name=name,
                checkpoint=reference,
                checkpoint_sha256=reference_sha,
                declared=reference_variant(name, precision),
                resolved=reference_variant(name, precision),
                lanes=lanes,
                is_reference=True,
            )
            for name, (precision, lanes) in references.items()
        ),
        *(
            ArmSpec(
                name=name,
                checkpoint=checkpoints[source][0],
                checkpoint_sha256=checkpoints[source][1],
                declared=variants[source],
                resolved=resolved[source],
                lanes=candidate_lanes(request.lanes, variants[source]),
            )
            for name, source in candidate_names(request, variants).items()
        ),
    ]
    session = Session(
        request=request,
        settings=settings,
        suite=suite,
        tokens=tokens,
        vocabulary=vocabulary,
        device=device,
        code=code_identity(),
        machine=device_identity(device),
        reporter=reporter,
    )
    return run_arms(session, specs) if interpreters is None else run_vllm(session, specs, interpreters)


def _digest_checkpoint(checkpoint: Checkpoint, label: str, reporter: Reporter) -> str:
    with reporter.phase(f"digest {label}", sum(entry.nbytes for entry in checkpoint.tensors), "bytes") as advance:
        return checkpoint_digest(checkpoint, progress=advance)
