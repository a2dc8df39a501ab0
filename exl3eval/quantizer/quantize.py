"""Quantize a model layer by layer, each on the inputs that the already quantized prefix produces.

For each decoder layer: run the calibration rows through the 16-bit layer while accumulating X'X of every
linear's input, quantize its linears, put them back, and advance the rows through the quantized layer
(exl3-format.md, section 5.1). Activations are FP32. Long work: a layer that is finished is on disk and is
not done again.

Shapes: k inputs, n outputs, T calibration tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from exl3_kernels.ldlq import QuantizedLinear, quantize_linears
from exl3_kernels.linear import Exl3Linear, FusedExl3Linear
from exl3_kernels.weight import CODEBOOKS, Exl3Weight
from exl3eval.checkpoint.directory import open_checkpoint
from exl3eval.checkpoint.load import checkpoint_digest
from exl3eval.engine.model import load_plain_model
from exl3eval.engine.placement import FUSIONS, replace_module
from exl3eval.errors import CheckpointError, InvalidRunError, UsageError
from exl3eval.progress import Reporter
from exl3eval.quantizer.allocation import BitGroup, allocate_bits
from exl3eval.quantizer.calibration import sampled_rows, text_rows
from exl3eval.quantizer.unfused import UnfusedExperts
from exl3eval.quantizer.write import LayerStore, write_directory

DISPATCH = "1-:reference"
_ROUTER_NAMES = ("gate", "router", "shared_expert_gate")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")
BATCH_ROWS = 8
RECENT_INPUTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeRequest:
    """What to make.

    Parameters
    ----------
    model, out : Path
        16-bit source and new EXL3 directory.
    bits : float
        Average over body weights.
    head_bits : int
        1 to 8, or 16 to leave the head.
    codebook : str
        `mcg`, `mul1` or `3inst`.
    calibration : Path or None
        Text, or None for rows sampled from the model.
    rows, columns : int
        Calibration rows and their length; 0 rows encode every weight by itself, without error feedback.
    seed : int
        Of signs, rows and sampling.
    """

    model: Path
    out: Path
    bits: float
    head_bits: int
    codebook: str
    calibration: Path | None
    rows: int
    columns: int
    seed: int

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8:
            raise UsageError(f"--bits is {self.bits}", hint="1 to 8 bits per weight")
        if self.head_bits not in (*range(1, 9), 16):
            raise UsageError(f"--head-bits is {self.head_bits}", hint="1 to 8, or 16 to leave the head unquantized")
        if self.codebook not in CODEBOOKS:
            raise UsageError(f"--codebook is {self.codebook!r}", hint=f"use one of: {', '.join(CODEBOOKS)}")
        if self.rows < 0 or self.columns < 16:
            raise UsageError(f"{self.rows} rows of {self.columns} tokens", hint="rows of 16 tokens or more, or no rows")


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """One linear to quantize, as it will be stored: a whole `nn.Linear`, or some rows of a fused one."""

    key: str
    linear: nn.Linear
    first_output: int
    num_outputs: int

    @property
    def weight_kn(self) -> torch.Tensor:
        """FP32 [k, n]."""
        return self.linear.weight[self.first_output : self.first_output + self.num_outputs].float().T

    @property
    def bias_n(self) -> torch.Tensor | None:
        """[n] or None."""
        bias: torch.Tensor | None = self.linear.bias
        if bias is None:
            return None
        return bias[self.first_output : self.first_output + self.num_outputs]


class InputMoments:
    """Accumulates X'X of linears' inputs; linears that are fed the same tensor share one matrix."""

    def __init__(self, linears: Iterable[tuple[str, nn.Linear]]) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self.counts: dict[str, int] = {}
        self.shared: dict[str, str] = {}
        self._recent: deque[tuple[torch.Tensor, str]] = deque(maxlen=RECENT_INPUTS)
        self._hooks = [
            linear.register_forward_pre_hook(lambda _, inputs, name=name: self._add(name, inputs[0]))
            for name, linear in linears
        ]

    def _add(self, name: str, x: torch.Tensor) -> None:
        for seen, owner in self._recent:
            if seen is x and owner != name:
                self.shared[name] = owner
                return
        self._recent.append((x, name))
        rows = x.reshape(-1, x.shape[-1]).float()
        rows = rows[torch.isfinite(rows).all(dim=1)]
        if name not in self.sums:
            self.sums[name] = torch.zeros(rows.shape[1], rows.shape[1], device=rows.device)
            self.counts[name] = 0
        self.sums[name].addmm_(rows.T, rows)
        self.counts[name] += len(rows)

    def close(self) -> None:
        """Stop listening."""
        self._recent.clear()
        for hook in self._hooks:
            hook.remove()

    def mean(self, name: str) -> torch.Tensor | None:
        """Return X'X / T of one linear's input, [k, k], or None if it saw no token."""
        owner = self.shared.get(name, name)
        count = self.counts.get(owner, 0)
        return self.sums[owner] / count if count else None


def quantize_model(
    request: QuantizeRequest, *, device: torch.device, num_threads: int, reporter: Reporter
) -> dict[str, Any]:
    """Quantize a model directory and write an EXL3 directory.

    Returns
    -------
    dict
        Path-free summary: bits reached, modules, mean proxy error, fallbacks.

    Raises
    ------
    UsageError, CheckpointError
        Before any work, if the request does not fit the model or `out` holds something.
    InvalidRunError
        If activations or weights are not finite, naming the module.
    """
    torch.set_num_threads(num_threads)
    checkpoint = open_checkpoint(request.model)
    if checkpoint.is_exl3 or checkpoint.quant_method:
        raise UsageError(f"{request.model.name} is quantized already", hint="give the 16-bit model")
    source_digest = checkpoint_digest(checkpoint)
    store = LayerStore(request.out, {**_settings(request), "source": source_digest})
    model = load_plain_model(checkpoint, dtype=torch.float32, device=device, trust_remote_code=False)
    model.eval().requires_grad_(False)
    rows = _calibration_rows(request, model, device) if request.rows else torch.empty(0, request.columns).long()
    layers = _decoder_layers(model)
    prefix = next(name for name, module in model.named_modules() if module is layers)
    unfuse_experts(model)
    projections = {index: _projections(layer, f"{prefix}.{index}", model.config) for index, layer in enumerate(layers)}
    widths = allocate_bits(_bit_groups(projections), request.bits)
    results: list[QuantizedLinear] = []
    with torch.inference_mode(), reporter.phase("quantize", len(layers) + 1, "layers") as advance:
        states = _first_inputs(model, layers[0], rows)
        for index, layer in enumerate(layers):
            results += _quantize_layer(layer, projections[index], states, widths, request, store, f"layer-{index:04d}")
            states = [(_call(layer, hidden, kwargs), kwargs) for hidden, kwargs in states]
            advance(1)
        if request.head_bits != 16:
            results += _quantize_head(model, states, request, store)
        advance(1)
    return write_directory(request.out, store, checkpoint, _settings(request), results)


def _settings(request: QuantizeRequest) -> dict[str, Any]:
    return {
        "bits": request.bits,
        "head_bits": request.head_bits,
        "codebook": request.codebook,
        "calibration": {"rows": request.rows, "cols": request.columns},
        "seed": request.seed,
        "text": request.calibration is not None,
    }


def _calibration_rows(request: QuantizeRequest, model: nn.Module, device: torch.device) -> torch.Tensor:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(request.model, local_files_only=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{request.model.name}: no tokenizer", hint="copy the model's tokenizer there") from error
    if request.calibration is not None:
        return text_rows(request.calibration, tokenizer, rows=request.rows, columns=request.columns, seed=request.seed)
    return sampled_rows(
        model, len(tokenizer), rows=request.rows, columns=request.columns, seed=request.seed, device=device
    )


def _decoder_layers(model: nn.Module) -> nn.ModuleList:
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise CheckpointError(
            f"{type(model).__name__} has no list of decoder layers", hint="this architecture cannot be quantized here"
        )
    return layers


def unfuse_experts(model: nn.Module) -> None:
    """Replace every fused 3-D expert module by separate linears."""
    fused = [
        name
        for name, module in model.named_modules()
        if isinstance(getattr(module, "gate_up_proj", None), torch.Tensor) and hasattr(module, "num_experts")
    ]
    for name in fused:
        replace_module(model, name, UnfusedExperts(model.get_submodule(name)))


def _projections(layer: nn.Module, prefix: str, config: Any) -> list[Projection]:
    found = []
    for name, module in layer.named_modules():
        leaf = name.rpartition(".")[2]
        if not isinstance(module, nn.Linear) or leaf in _ROUTER_NAMES:
            continue
        key = f"{prefix}.{name}"
        first = 0
        for part, size in _parts(leaf, module, config):
            stored = f"{key.rpartition('.')[0]}.{part}"
            found.append(Projection(key=stored, linear=module, first_output=first, num_outputs=size))
            first += size
    return found


def _parts(leaf: str, linear: nn.Linear, config: Any) -> list[tuple[str, int]]:
    """Split a fused linear as upstream stores it."""
    if leaf == "gate_up_proj":
        return [(part, linear.out_features // 2) for part in FUSIONS[leaf]]
    if leaf == "qkv_proj":
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        sizes = [config.num_attention_heads * head, *[config.num_key_value_heads * head] * 2]
        return list(zip(FUSIONS[leaf], sizes, strict=True))
    return [(leaf, linear.out_features)]


def _bit_groups(projections: dict[int, list[Projection]]) -> list[BitGroup]:
    members: dict[tuple[int, int, str], list[Projection]] = {}
    for layer, found in projections.items():
        for projection in found:
            leaf = projection.key.rpartition(".")[2]
            attention = leaf in _ATTENTION
            if ".experts." in projection.key:
                kind = "experts"
            elif leaf in ("q_proj", "k_proj", "v_proj"):
                kind = "qkv"
            else:
                kind = "gate_up" if leaf in ("gate_proj", "up_proj") else leaf
            members.setdefault((layer, 2 if attention else 0, kind), []).append(projection)
    return [
        BitGroup(
            keys=tuple(projection.key for projection in group),
            num_weights=sum(projection.num_outputs * projection.linear.in_features for projection in group),
            priority=priority,
            layer=layer,
        )
        for (layer, priority, _), group in members.items()
    ]


class _FirstInputsTakenError(Exception):
    pass


def _first_inputs(model: nn.Module, layer: nn.Module, rows: torch.Tensor) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    """Return what the first layer is called with, batch by batch: hidden states and keyword arguments."""
    taken: list[tuple[torch.Tensor, dict[str, Any]]] = []

    def take(_: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = inputs[0] if inputs else kwargs.pop("hidden_states")
        taken.append((hidden, kwargs))
        raise _FirstInputsTakenError

    hook = layer.register_forward_pre_hook(take, with_kwargs=True)
    device = next(model.parameters()).device
    for batch in rows.split(BATCH_ROWS) if len(rows) else ():
        try:
            model(input_ids=batch.to(device), use_cache=False)
        except _FirstInputsTakenError:
            continue
    hook.remove()
    return taken


def _call(layer: nn.Module, hidden: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    output = layer(hidden, **kwargs)
    return output[0] if isinstance(output, tuple) else output


def _quantize_layer(
    layer: nn.Module,
    projections: list[Projection],
    states: list[tuple[torch.Tensor, dict[str, Any]]],
    widths: dict[str, int],
    request: QuantizeRequest,
    store: LayerStore,
    part: str,
) -> list[QuantizedLinear]:
    finished = store.load(part, projections[0].linear.weight.device)
    if finished is None:
        moments = InputMoments((projection.key, projection.linear) for projection in _one_per_linear(projections))
        _set_everyone(layer, True)
        for hidden, kwargs in states:
            if not bool(torch.isfinite(_call(layer, hidden, kwargs)).all()):
                raise InvalidRunError(
                    f"{part}: activations are not finite", hint="the source model overflows on the calibration rows"
                )
        moments.close()
        _set_everyone(layer, False)
        finished = _quantize_projections(projections, moments, widths, request)
        store.save(part, finished)
    _replace_linears(layer, projections, finished)
    return list(finished.values())


def _one_per_linear(projections: list[Projection]) -> list[Projection]:
    return [projection for projection in projections if projection.first_output == 0]


def _set_everyone(layer: nn.Module, everyone: bool) -> None:
    for module in layer.modules():
        if isinstance(module, UnfusedExperts):
            module.everyone = everyone


def _quantize_projections(
    projections: list[Projection], moments: InputMoments, widths: dict[str, int], request: QuantizeRequest
) -> dict[str, QuantizedLinear]:
    owner = {id(projection.linear): projection.key for projection in _one_per_linear(projections)}
    by_width: dict[int, list[Projection]] = {}
    for projection in projections:
        by_width.setdefault(projection.linear.in_features, []).append(projection)
    done: dict[str, QuantizedLinear] = {}
    for group in by_width.values():
        means: dict[str, torch.Tensor | None] = {}
        for projection in group:
            name = owner[id(projection.linear)]
            name = moments.shared.get(name, name)
            if name not in means:
                means[name] = moments.mean(name)
        hessians = [means[moments.shared.get(owner[id(p.linear)], owner[id(p.linear)])] for p in group]
        try:
            results = quantize_linears(
                [projection.weight_kn for projection in group],
                hessians,
                bits=[widths[projection.key] for projection in group],
                codebook=request.codebook,
                seed=request.seed,
            )
        except ValueError as error:
            names = ", ".join(projection.key for projection in group)
            raise InvalidRunError(f"{names}: {error}", hint="check the source weights") from error
        for projection, result in zip(group, results, strict=True):
            done[projection.key] = replace(result, weight=_with_bias(result.weight, projection.bias_n))
    return {projection.key: done[projection.key] for projection in projections}


def _with_bias(weight: Exl3Weight, bias_n: torch.Tensor | None) -> Exl3Weight:
    if bias_n is None:
        return weight
    padded = nn.functional.pad(bias_n.half(), (0, weight.out_features - len(bias_n)))
    return replace(weight, bias=padded)


def _replace_linears(layer: nn.Module, projections: list[Projection], done: dict[str, QuantizedLinear]) -> None:
    names = {id(module): name for name, module in layer.named_modules()}
    parts: dict[int, list[Exl3Linear]] = {}
    for projection in projections:
        parts.setdefault(id(projection.linear), []).append(
            Exl3Linear(
                done[projection.key].weight,
                dispatch=DISPATCH,
                in_features=projection.linear.in_features,
                out_features=projection.num_outputs,
            )
        )
    for linear, modules in parts.items():
        replace_module(layer, names[linear], modules[0] if len(modules) == 1 else FusedExl3Linear(modules))


def _quantize_head(
    model: nn.Module,
    states: list[tuple[torch.Tensor, dict[str, Any]]],
    request: QuantizeRequest,
    store: LayerStore,
) -> list[QuantizedLinear]:
    head = model.get_output_embeddings()  # type: ignore[operator]
    assert isinstance(head, nn.Linear)
    finished = store.load("head", head.weight.device)
    if finished is None:
        key = next(name for name, module in model.named_modules() if module is head)
        norm = getattr(model.base_model, "norm", None) or nn.Identity()
        projection = Projection(key=key, linear=head, first_output=0, num_outputs=head.out_features)
        moments = InputMoments([(key, head)])
        for hidden, _ in states:
            for row in norm(hidden):
                head(row)
        moments.close()
        finished = _quantize_projections([projection], moments, {key: request.head_bits}, request)
        store.save("head", finished)
    return list(finished.values())
