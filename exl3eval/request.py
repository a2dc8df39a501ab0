"""What one call measures, and everything about it that can be refused before a model is loaded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from exl3_kernels.dispatch import measured_on
from exl3eval.bundled import bundled_model
from exl3eval.checkpoint.directory import Checkpoint, open_checkpoint
from exl3eval.engine.device import resolve_device
from exl3eval.engine.lanes import Lane, threshold_rows
from exl3eval.engine.placement import dispatches_of
from exl3eval.errors import UsageError
from exl3eval.variant import NO_QUANTIZING, Variant, load_variant, resolve_variant

REFERENCE = "reference"
PRECISIONS = ("float32", "bfloat16")
PREFILL = Lane(kind="prefill")
TRANSFORMERS, VLLM = "transformers", "vllm"
ENGINES = (TRANSFORMERS, VLLM)
DECODE_STYLES = ("one-token", "forced")
POSITIONS, VLLM_CPU_POSITIONS = 512, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class KldRequest:
    """What to measure. The defaults are the main job on the bundled model.

    Parameters
    ----------
    model, reference : Path or None
        EXL3 and BF16 directories; both None for the bundled model.
    variant, baseline : str
        Variant names or `.toml` files; the paired delta is variant minus baseline.
    suite : Path or None
        Suite folder, None for the shipped one.
    split : str
        `analysis`; `qualification` is sealed and must be asked for.
    num_contexts : int or None
        A balanced prefix of the suite's permutation, None for all.
    num_positions : int
        Scored predictions per context.
    reference_precision : str
        Arithmetic of the reference's activations: `float32` or `bfloat16`.
    lanes : tuple of Lane
        How contexts are fed to the arms under test, each a run of its own; the reference always runs in one prefill.
    shared_head : bool
        Score both candidates through the reference's head as well, as arms of their own.
    engine : str
        What runs the arms: `transformers`, or `vllm` with its own scheduler, attention and head.
    reference_engine : str
        What runs the reference of arms under vLLM; `transformers` makes the difference between engines a floor.
    compiled : bool
        Under vLLM: run candidates under torch.compile.
    decode_style : str
        Under vLLM: `one-token` feeds held-out ids as prompts, `forced` makes vLLM sample them.
    device : str
        `auto`, `cpu`, `cuda` or `cuda:N`.
    seed : int
        Of the context order and of resampling.
    trust_remote_code : bool
        Let transformers run code from the model directories.
    fresh : bool
        Ignore captures of earlier runs.
    """

    model: Path | None = None
    reference: Path | None = None
    variant: str = "base"
    baseline: str = "base"
    suite: Path | None = None
    split: str = "analysis"
    num_contexts: int | None = None
    num_positions: int = POSITIONS
    reference_precision: str = "float32"
    lanes: tuple[Lane, ...] = (PREFILL,)
    shared_head: bool = False
    engine: str = TRANSFORMERS
    reference_engine: str = ""
    compiled: bool = False
    decode_style: str = DECODE_STYLES[0]
    device: str = "auto"
    seed: int = 1
    trust_remote_code: bool = False
    fresh: bool = False


def floor_precision(request: KldRequest) -> str:
    """Return the precision that the reference is not evaluated in."""
    return next(precision for precision in PRECISIONS if precision != request.reference_precision)


def floor_name(request: KldRequest) -> str:
    """Name the arm that evaluates the reference at the other precision."""
    return f"{REFERENCE}-{floor_precision(request)}"


def _model_directories(request: KldRequest) -> tuple[Path, Path]:
    if request.model is None and request.reference is None:
        return bundled_model("exl3"), bundled_model("bf16")
    if request.model is None:
        raise UsageError("--reference was given without --model", hint="give the EXL3 directory with --model")
    if request.reference is None:
        raise UsageError(
            "--model was given without --reference", hint="give the BF16 directory that the model was made from"
        )
    return request.model, request.reference


def check_request(request: KldRequest) -> None:
    """Check what the variants and models have no say in.

    Raises
    ------
    UsageError
        Naming the option.
    """
    if request.reference_precision not in PRECISIONS:
        raise UsageError(
            f"--reference-precision is {request.reference_precision!r}", hint=f"use one of: {', '.join(PRECISIONS)}"
        )
    if request.num_positions < 1:
        raise UsageError(f"--positions is {request.num_positions}", hint="score at least 1 position per context")
    if request.num_contexts is not None and request.num_contexts < 1:
        raise UsageError(f"--num-contexts is {request.num_contexts}", hint="score at least 1 context")


def lane_control_name(lane: Lane) -> str:
    """Name an unquantized control: the reference in a lane under test."""
    return f"{REFERENCE}-{lane.slug}"


def lane_control_names(lane: Lane) -> tuple[str, str]:
    """Return the names that a lane's control can have: plain, and under a compiling engine."""
    return lane_control_name(lane), f"{lane_control_name(lane)}-compiled"


def shared_head_name(arm: str) -> str:
    """Name an arm scored through the reference's head."""
    return f"{arm}@shared-head"


def candidate_lanes(lanes: Iterable[Lane], variant: Variant) -> tuple[Lane, ...]:
    """Return the lanes as a variant runs them: its decode steps replayed, if it says so."""
    return tuple(replace(lane, graph=variant.graphs == "decode" and lane.kind == "decode") for lane in lanes)


def reference_variant(name: str, precision: str) -> Variant:
    """Return what a reference arm runs."""
    return Variant(
        name=name,
        doc=f"The BF16 weights with {precision} activations.",
        activations=precision,
        linear="1-:reference",
        embedding="stored",
    )


def candidate_names(request: KldRequest, variants: Mapping[str, Variant]) -> dict[str, str]:
    """Map arm names to what was asked for; a variant against itself runs twice and must give the same bits."""
    baseline, variant = variants[request.baseline].name, variants[request.variant].name
    return {baseline: request.baseline, variant if variant != baseline else f"{variant}-repeat": request.variant}


def check_lanes(request: KldRequest, variants: Iterable[Variant]) -> None:
    """Check that every variant means something in every lane.

    Raises
    ------
    UsageError
        Naming the variant and a lane that suits it, or positions that a lane cannot score.
    """
    for lane in request.lanes:
        for variant in variants:
            if variant.lanes and lane.kind not in variant.lanes:
                raise UsageError(
                    f"variant `{variant.name}` says nothing in lane {lane.name}",
                    hint=f"use --lane {variant.lanes[0]}",
                )
        lane.first_scored(request.num_positions)


def check_engine(request: KldRequest, variants: Collection[Variant], device_type: str) -> None:
    """Check that the engine exists and can run what the variants declare on a device.

    Raises
    ------
    UsageError
        Naming the option.
    """
    for option, value, known in (
        ("--engine", request.engine, ENGINES),
        ("--reference-engine", request.reference_engine or request.engine, ENGINES),
        ("--decode-style", request.decode_style, DECODE_STYLES),
    ):
        if value not in known:
            raise UsageError(f"{option} is {value!r}", hint=f"use one of: {', '.join(known)}")
    for variant in variants:
        if variant.graphs != "off" and device_type != "cuda":
            raise UsageError(
                f"variant `{variant.name}` replays CUDA graphs, which need a GPU", hint="use --device cuda"
            )
        if variant.quantize != NO_QUANTIZING and request.engine == VLLM:
            raise UsageError(
                f"variant `{variant.name}` quantizes at load, which vLLM does not", hint="use --engine transformers"
            )
    if request.engine == VLLM:
        if request.shared_head:
            raise UsageError(
                "--shared-head under vLLM: an engine scores its own head", hint="use the variant `head-bf16`"
            )
        return
    for option, given in (
        ("--compile", request.compiled),
        ("--decode-style", request.decode_style != DECODE_STYLES[0]),
        ("--reference-engine", request.reference_engine == VLLM),
    ):
        if given:
            raise UsageError(f"{option} is for arms under vLLM", hint="add --engine vllm")
    for variant in variants:
        if variant.vllm is not None:
            raise UsageError(f"variant `{variant.name}` declares a vLLM stack", hint="add --engine vllm")


def default_positions(engine: str, device_name: str) -> int:
    """Return the positions per context that a run scores unless told: fewer where vLLM runs on a CPU."""
    on_cpu = resolve_device(device_name).type == "cpu"
    return VLLM_CPU_POSITIONS if engine == VLLM and on_cpu else POSITIONS


def open_models(request: KldRequest) -> tuple[Checkpoint, Checkpoint]:
    """Open the model and its reference, from headers alone.

    Raises
    ------
    UsageError, CheckpointError
        If one cannot be read, or is not of the kind it is given as.
    """
    model_dir, reference_dir = _model_directories(request)
    model, reference = open_checkpoint(model_dir), open_checkpoint(reference_dir)
    if reference.is_exl3 or reference.quant_method:
        raise UsageError(
            f"the reference {reference_dir.name} is quantized ({reference.quant_method or 'exl3'})",
            hint="the reference is the 16-bit model",
        )
    if model.quant_method not in (None, "exl3"):
        raise UsageError(f"{model_dir.name} is quantized as {model.quant_method}", hint="give an EXL3 directory")
    return model, reference


def decode_rows(model: Path | None, variants: Iterable[str], device_name: str) -> list[int]:
    """Return the decode row counts that reach every route of some variants on a model, see `threshold_rows`.

    Raises
    ------
    UsageError, CheckpointError
        If a variant, the model or the device cannot be had.
    """
    device = resolve_device(device_name)
    checkpoint = open_checkpoint(model or bundled_model("exl3"))
    resolved = [resolve_variant(load_variant(name), device.type, measured=measured_on(device)) for name in variants]
    return threshold_rows(d for variant in resolved for d in dispatches_of(checkpoint, variant.linear, device))
