"""Running the smoke test: reference, baseline and variant over the same prompts, one arm loaded at a time."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from exl3_kernels.dispatch import measured_on
from exl3_kernels.routes import Launch, read_launches, reset_launches
from exl3eval.arm import check_routes_ran
from exl3eval.checkpoint.directory import Checkpoint
from exl3eval.checkpoint.load import checkpoint_digest
from exl3eval.engine.device import pin_arithmetic, resolve_device
from exl3eval.engine.head import Head
from exl3eval.engine.model import load_arm
from exl3eval.engine.placement import check_routes
from exl3eval.engine.vocabulary import Vocabulary, check_same_vocabulary, read_vocabulary
from exl3eval.errors import InvalidRunError, UsageError
from exl3eval.identity import code_identity, device_identity
from exl3eval.progress import Reporter
from exl3eval.request import REFERENCE, KldRequest, check_request, open_models, reference_variant
from exl3eval.smoke.agreement import Agreement, Continuation, compare_continuation, says_something, summarise
from exl3eval.smoke.decode import Decoded, Decoder, decode
from exl3eval.smoke.judge import Verdict, judge
from exl3eval.smoke.needle import Retrieval, make_needles, score_needles
from exl3eval.suite.load import Suite, load_suite
from exl3eval.suite.tokens import TokenSuite, load_tokenizer, tokenize_suite
from exl3eval.variant import NO_QUANTIZING, Variant, load_variant, resolve_variant


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeRequest:
    """What to run.

    Parameters
    ----------
    models : KldRequest
        Models, variants, suite, contexts, device and seed, as `exl3eval kld` takes them; `num_positions` is the length
        of every prompt in ids.
    depths : tuple of float
        Where secrets are planted, 0 to 1.
    steps : int
        Ids decoded after each context.
    allow_lost : int
        Secrets that the variant may lose.
    """

    models: KldRequest
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    steps: int = 32
    allow_lost: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeArm:
    """One arm: what it is, what it launched, what it made of the prompts."""

    name: str
    checkpoint_sha256: str
    declared: Variant
    resolved: Variant
    attention: str
    launches: dict[Launch, int]
    retrieval: Retrieval
    agreement: Agreement


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeRun:
    """A finished smoke test; `texts` is the number of contexts that the reference continues with more than one id."""

    request: SmokeRequest
    suite: Suite
    tokens: TokenSuite
    vocabulary: Vocabulary
    arms: dict[str, SmokeArm]
    texts: int
    verdict: Verdict
    code: dict[str, Any]
    device: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spec:
    name: str
    checkpoint: Checkpoint
    declared: Variant
    resolved: Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reference:
    """The reference's texts by context, and the head that their hidden states belong to."""

    texts: dict[str, Decoded]
    head: Head


def run_smoke(request: SmokeRequest, *, cache_dir: Path, num_threads: int, reporter: Reporter) -> SmokeRun:
    """Run the smoke test.

    Raises
    ------
    UsageError, CheckpointError, SuiteError
        Before any model is loaded, if anything asked for does not exist or does not fit.
    InvalidRunError
        If an arm does not decode deterministically, or does not run the routes that its variant declares.
    """
    models = request.models
    check_request(models)
    if request.steps < 1 or request.allow_lost < 0:
        raise UsageError(
            f"steps {request.steps}, allowed losses {request.allow_lost}", hint="give 1 or more, 0 or more"
        )
    torch.set_num_threads(num_threads)
    pin_arithmetic()
    device = resolve_device(models.device)
    model, reference = open_models(models)
    specs = _specs(models, model, reference, device)
    vocabulary = read_vocabulary(reference.directory)
    check_same_vocabulary(vocabulary, read_vocabulary(model.directory))
    suite = load_suite(models.suite)
    tokens = tokenize_suite(
        suite,
        reference.directory,
        split=models.split,
        num_contexts=models.num_contexts,
        num_tokens=models.num_positions,
        seed=models.seed,
        cache_dir=cache_dir,
    )
    tokenizer = load_tokenizer(reference.directory)
    needles = make_needles(
        tokens.contexts,
        request.depths,
        length=models.num_positions,
        seed=models.seed,
        encode=lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
    )
    digests = {id(each): checkpoint_digest(each) for each in (model, reference)}
    prompts = {context.id: torch.from_numpy(context.ids.astype("int64")) for context in tokens.contexts}
    arms: dict[str, SmokeArm] = {}
    known: _Reference | None = None
    for spec in specs:
        with reporter.phase(f"decode {spec.name}", len(needles) + len(prompts), "prompts") as advance:
            reset_launches()
            loaded = load_arm(
                spec.checkpoint,
                spec.resolved,
                vocab_size=vocabulary.size,
                device=device,
                trust_remote_code=models.trust_remote_code,
            )
            own_head = known is None or spec.resolved.head == "own"
            decoder = Decoder(
                arm=loaded,
                head=loaded.head if own_head or known is None else known.head,
                round_logits=spec.resolved.logits == "bfloat16",
            )
            outputs = []
            for needle in needles:
                outputs.append(decode(decoder, needle.prompt, len(needle.secret)).ids)
                advance(1)
            if known is None:
                known = _Reference(texts=_texts(decoder, prompts, request.steps), head=loaded.head)
            continuations = _continue(decoder, prompts, known, request.steps)
            advance(len(prompts))
            arms[spec.name] = SmokeArm(
                name=spec.name,
                checkpoint_sha256=digests[id(spec.checkpoint)],
                declared=spec.declared,
                resolved=spec.resolved,
                attention=loaded.attention,
                launches=read_launches(),
                retrieval=score_needles(spec.name, needles, outputs),
                agreement=summarise(spec.name, continuations),
            )
        check_routes_ran(spec.name, spec.resolved, arms[spec.name].launches, where="the decode smoke")
        del loaded, decoder
        gc.collect()
    assert known is not None
    judged = specs[-1].name
    return SmokeRun(
        request=request,
        suite=suite,
        tokens=tokens,
        vocabulary=vocabulary,
        arms=arms,
        texts=len(known.texts),
        verdict=judge(
            judged,
            {name: arm.retrieval for name, arm in arms.items()},
            {name: arm.agreement for name, arm in arms.items()},
            num_contexts=len(prompts),
            allow_lost=request.allow_lost,
        ),
        code=code_identity(),
        device=device_identity(device),
    )


def _specs(models: KldRequest, model: Checkpoint, reference: Checkpoint, device: torch.device) -> list[_Spec]:
    """List reference, baseline and variant; a variant that is the baseline is judged against the reference alone."""
    bf16 = reference_variant(REFERENCE, models.reference_precision)
    specs = [_Spec(name=REFERENCE, checkpoint=reference, declared=bf16, resolved=bf16)]
    for name in dict.fromkeys((models.baseline, models.variant)):
        declared = load_variant(name)
        if declared.graphs != "off" or declared.quantize != NO_QUANTIZING:
            raise UsageError(
                f"variant `{declared.name}` replays graphs or quantizes at load",
                hint="the smoke test decodes stored models step by step: use `exl3eval kld --lane decode`",
            )
        resolved = resolve_variant(declared, device.type, measured=measured_on(device))
        check_routes(model, resolved.linear, device)
        specs.append(_Spec(name=declared.name, checkpoint=model, declared=declared, resolved=resolved))
    return specs


def _texts(decoder: Decoder, prompts: Mapping[str, torch.Tensor], steps: int) -> dict[str, Decoded]:
    """Continue every context, keeping texts that are more than one id repeated.

    Raises
    ------
    InvalidRunError
        If none is.
    """
    texts = {name: decode(decoder, prompt_P, steps) for name, prompt_P in prompts.items()}
    kept = {name: text for name, text in texts.items() if says_something(text.ids)}
    if not kept:
        raise InvalidRunError(
            f"the reference continues each of {len(texts)} contexts with one id repeated: agreeing proves nothing",
            hint="decode more --steps, or use a model that writes",
        )
    return kept


def _continue(
    decoder: Decoder, prompts: Mapping[str, torch.Tensor], reference: _Reference, steps: int
) -> Sequence[Continuation]:
    continuations = []
    for name, text in reference.texts.items():
        free = decode(decoder, prompts[name], steps)
        forced = decode(decoder, prompts[name], steps, along=text.ids)
        logits_SV = reference.head.logits(text.hidden.to(decoder.arm.device))
        continuations.append(compare_continuation(free.ids, forced.ids, text.ids, logits_SV))
    return continuations
