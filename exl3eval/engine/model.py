"""Loading one arm's model with transformers, and running contexts through it.

Two kinds of arm share one shape: the BF16 reference, loaded by transformers itself, and an EXL3 candidate,
built empty and filled from the checkpoint with EXL3 modules behind one op. Only safetensors are read and
remote code runs only when asked for.

Shapes: T positions, H hidden size, V vocabulary.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from exl3_kernels.embedding import Int8Embedding
from exl3_kernels.linear import Exl3Linear
from exl3eval.checkpoint.directory import Checkpoint
from exl3eval.engine.graphs import DecodeGraph
from exl3eval.engine.head import Head, HeadSource, find_head, make_head
from exl3eval.engine.lanes import Lane, run_batch
from exl3eval.engine.placement import (
    Placement,
    fill_parameters,
    place_exl3_modules,
    replace_module,
)
from exl3eval.errors import CheckpointError, InvalidRunError, UsageError
from exl3eval.variant import Variant

PROBE_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingBytes:
    """Size of the input embedding as stored and as run."""

    stored: int
    run: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmModel:
    """A loaded arm: ids to post-final-norm hidden states, and hidden states to FP32 logits.

    A step captured for a lane under graphs is kept for the lane's next batch.
    """

    model: nn.Module
    decoder: nn.Module
    head: Head
    device: torch.device
    head_source: HeadSource
    embedding_bytes: EmbeddingBytes
    attention: str
    _graphs: dict[tuple[int, int], DecodeGraph] = field(default_factory=dict, repr=False)

    def hidden_states(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Run one context in one prefill: int [T] -> [T, H], in the dtype that the model emits.

        Raises
        ------
        InvalidRunError
            If a hidden state is not finite.
        """
        return self.run_lane(ids_T[None], Lane(kind="prefill"))[0]

    def run_lane(self, ids_BT: torch.Tensor, lane: Lane) -> torch.Tensor:
        """Run a batch of contexts through a lane: int [B, T] -> [B, S, H] of its scored positions.

        Raises
        ------
        InvalidRunError
            If a hidden state is not finite.
        UsageError
            If the lane needs a CUDA graph and cannot have one.
        """
        ids_BT = ids_BT.to(self.device)
        hidden_BSH = run_batch(self.decoder, ids_BT, lane, self._graph(ids_BT) if lane.graph else None)
        finite_S = torch.isfinite(hidden_BSH).all(dim=2).all(dim=0)
        if not bool(finite_S.all()):
            raise InvalidRunError(
                f"hidden states are not finite from position {int(torch.nonzero(~finite_S)[0])} on",
                hint="activations overflowed or the checkpoint is damaged; no number is reported",
            )
        return hidden_BSH

    @torch.inference_mode()
    def _graph(self, ids_BT: torch.Tensor) -> DecodeGraph:
        if self.device.type != "cuda":
            raise UsageError("CUDA graphs need a GPU", hint="use --device cuda, or a variant without graphs")
        shape = (ids_BT.shape[0], ids_BT.shape[1])
        if shape not in self._graphs:
            self._graphs[shape] = DecodeGraph(self.decoder, ids_BT.long())
        return self._graphs[shape]

    def can_replay(self, ids_BT: torch.Tensor) -> bool:
        """Whether a decode step of this model can be captured, for batches of this shape."""
        try:
            self._graph(ids_BT.to(self.device))
        except UsageError:
            return False
        return True

    @torch.inference_mode()
    def live_logits(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Return the logits that the whole model emits in one prefill, FP32: int [T] -> [T, V]."""
        logits_TW = self.model(input_ids=ids_T[None].to(self.device), use_cache=False).logits[0]
        return logits_TW[:, : self.head.vocab_size].float()


def _load_config(checkpoint: Checkpoint, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    _quiet_transformers()
    if checkpoint.config.get("auto_map") and not trust_remote_code:
        raise CheckpointError(
            f"{checkpoint.directory.name}: config.json asks to run code from the model directory (auto_map)",
            hint="read that code, then pass --trust-remote-code",
        )
    try:
        config = AutoConfig.from_pretrained(
            checkpoint.directory, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{checkpoint.directory.name}: transformers cannot read config.json: {_first_line(error)}",
            hint="check config.json, or install a transformers that knows this architecture",
        ) from error
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def _quiet_transformers() -> None:
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200]


def _causal_class(config: Any, checkpoint: Checkpoint) -> Any:
    from transformers import AutoModelForCausalLM

    if type(config) not in AutoModelForCausalLM._model_mapping and not getattr(config, "auto_map", None):
        raise CheckpointError(
            f"{checkpoint.directory.name}: {config.model_type!r} is not a causal language model of this transformers",
            hint="give a causal LM directory",
        )
    return AutoModelForCausalLM


class Fp32AccumulatedLinear(nn.Linear):
    """A 16-bit linear whose products are accumulated in FP32 and rounded once.

    This is what GPUs do. A CPU without BF16 instructions accumulates otherwise, and takes five times as long.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the linear: [..., k] -> [..., n], in the dtype of `x`."""
        bias: torch.Tensor | None = self.bias
        y = nn.functional.linear(x.float(), self.weight.float(), None if bias is None else bias.float())
        return y.to(x.dtype)


def _accumulate_in_fp32(model: nn.Module) -> None:
    plain = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    for name in plain:
        module = model.get_submodule(name)
        assert isinstance(module, nn.Linear)
        exact = Fp32AccumulatedLinear(module.in_features, module.out_features, bias=False, device="meta")
        exact.weight, exact.bias = module.weight, module.bias
        replace_module(model, name, exact)


def load_plain_model(
    checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device, trust_remote_code: bool
) -> nn.Module:
    """Load a 16-bit Hugging Face directory with transformers, its weights cast to `dtype`.

    Raises
    ------
    CheckpointError
        If transformers refuses it, or leaves a parameter unfilled.
    """
    config = _load_config(checkpoint, trust_remote_code)
    auto = _causal_class(config, checkpoint)
    try:
        model, info = auto.from_pretrained(
            checkpoint.directory,
            config=config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except (ValueError, OSError, RuntimeError, KeyError) as error:
        raise CheckpointError(
            f"{checkpoint.directory.name}: transformers cannot load it: {_first_line(error)}",
            hint="check that config.json and the weights belong together",
        ) from error
    if device.type == "cpu" and dtype != torch.float32:
        _accumulate_in_fp32(model)
    wrong = [*info.get("missing_keys", ()), *info.get("mismatched_keys", ())]
    if wrong:
        raise CheckpointError(
            f"{checkpoint.directory.name}: no value for {wrong[0]} ({len(wrong)} parameters)",
            hint="fetch the whole checkpoint",
        )
    return model.to(device)


def build_exl3_model(
    checkpoint: Checkpoint, *, dispatch: str, dtype: torch.dtype, device: torch.device, trust_remote_code: bool
) -> nn.Module:
    """Build the model empty, put EXL3 modules in, and load the rest.

    Raises
    ------
    CheckpointError
        If anything stored has no place or anything needed is not stored.
    """
    from accelerate import init_empty_weights

    config = _load_config(checkpoint, trust_remote_code)
    auto = _causal_class(config, checkpoint)
    with init_empty_weights(include_buffers=False):
        model = auto.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    placement = Placement(checkpoint=checkpoint, dispatch=dispatch, device=device)
    place_exl3_modules(model, placement)
    fill_parameters(model, placement)
    return model.to(device)


def overlay_embedding(model: nn.Module, *, dtype: torch.dtype) -> None:
    """Replace the input embedding by its int8 overlay; a tied head keeps the stored table.

    Raises
    ------
    CheckpointError
        If the embedding is of a kind the overlay does not know.
    InvalidRunError
        If a row holds a non-finite value.
    """
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    name = next(name for name, module in model.named_modules() if module is embedding)
    plain = type(embedding) is nn.Embedding
    if not plain and not isinstance(getattr(embedding, "embed_scale", None), torch.Tensor):
        raise CheckpointError(
            f"{name} is a {type(embedding).__name__}: the int8 overlay knows plain and scaled embeddings",
            hint='use a variant with embedding = "stored"',
        )
    try:
        overlay: nn.Module = Int8Embedding(embedding.weight.detach(), out_dtype=dtype)
    except ValueError as error:
        raise InvalidRunError(f"{name}: {error}", hint="the checkpoint is damaged; no number is reported") from error
    scale = getattr(embedding, "embed_scale", None)
    if isinstance(scale, torch.Tensor):
        overlay = _ScaledEmbedding(overlay, scale)
    replace_module(model, name, overlay)


class _ScaledEmbedding(nn.Module):
    def __init__(self, rows: nn.Module, scale: torch.Tensor) -> None:
        super().__init__()
        self.rows = rows
        self.register_buffer("scale", scale)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.rows(ids)
        return rows * self.scale.to(rows.dtype)


def load_arm(
    checkpoint: Checkpoint,
    variant: Variant,
    *,
    vocab_size: int,
    device: torch.device,
    trust_remote_code: bool = False,
) -> ArmModel:
    """Load a model directory under a resolved variant.

    Parameters
    ----------
    checkpoint : Checkpoint
        EXL3 or 16-bit.
    variant : Variant
        Resolved; for a 16-bit directory only `activations` and `embedding` have a meaning.
    vocab_size : int
        Ids to score; head columns beyond it are cut before any softmax.
    device : device
        Where to run.
    trust_remote_code : bool
        Let transformers run code from the directory.

    Raises
    ------
    CheckpointError, InvalidRunError
        If the model cannot be loaded whole, or its logits are not the head's product that scoring assumes.
    """
    dtype = getattr(torch, variant.activations)
    if checkpoint.is_exl3:
        model = build_exl3_model(
            checkpoint, dispatch=variant.linear, dtype=dtype, device=device, trust_remote_code=trust_remote_code
        )
    else:
        model = load_plain_model(checkpoint, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    model.eval().requires_grad_(False)
    table = model.get_input_embeddings().weight  # type: ignore[operator, union-attr]
    stored_bytes = table.numel() * _stored_width(checkpoint, table)
    head = make_head(model, vocab_size=vocab_size)
    head_source = find_head(model, checkpoint, head)
    if variant.embedding == "int8":
        overlay_embedding(model, dtype=dtype)
    overlay = next((module for module in model.modules() if isinstance(module, Int8Embedding)), None)
    arm = ArmModel(
        model=model,
        decoder=model.base_model,  # type: ignore[arg-type]
        head=head,
        head_source=head_source,
        device=device,
        embedding_bytes=EmbeddingBytes(stored=stored_bytes, run=overlay.num_bytes if overlay else stored_bytes),
        attention=str(getattr(model.config, "_attn_implementation", "unknown")),
    )
    _check_head(arm)
    return arm


def _stored_width(checkpoint: Checkpoint, table: torch.Tensor) -> int:
    """Bytes per element of the embedding in the file, whatever dtype it runs in."""
    widths = [
        entry.nbytes // table.numel()
        for entry in checkpoint.plain.values()
        if "embed" in entry.name and list(entry.shape) == list(table.shape)
    ]
    return widths[0] if widths else table.element_size()


def _check_head(arm: ArmModel) -> None:
    """Compare `head(hidden states)` with the model's own logits on a few tokens, which must say something."""
    ids_T = torch.arange(PROBE_TOKENS, device=arm.device) * 37 % arm.head.vocab_size
    own_TV = arm.live_logits(ids_T)
    hidden_TH = arm.hidden_states(ids_T)
    check_probe(hidden_TH, type(arm.model).__name__)
    ours_TV = arm.head.logits(hidden_TH)
    scale = float(own_TV.abs().amax().clamp_min(1.0))
    tolerance = 2e-2 if _is_half(arm.model) else 1e-4
    worst = float((own_TV - ours_TV).abs().max())
    if not worst <= tolerance * scale:
        raise InvalidRunError(
            f"{type(arm.model).__name__}: the model's logits differ from its head applied to its hidden states by "
            f"{worst:.3g} (largest logit {scale:.3g})",
            hint="this architecture transforms hidden states or logits in a way that scoring does not know",
        )


def check_probe(hidden_TH: torch.Tensor, what: str) -> None:
    """Refuse a probe that cannot tell a right kernel from a wrong one: zero, or the same at every token.

    Raises
    ------
    InvalidRunError
        If the hidden states [T, H] of different tokens are all zero or all equal.
    """
    if not bool(hidden_TH.any()):
        raise InvalidRunError(f"{what}: every hidden state of the probe is zero", hint="the checkpoint is damaged")
    if len(hidden_TH) > 1 and bool((hidden_TH == hidden_TH[0]).all()):
        raise InvalidRunError(
            f"{what}: {len(hidden_TH)} different tokens give one hidden state", hint="the checkpoint is damaged"
        )


def _is_half(model: nn.Module) -> bool:
    return any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters()) or any(
        isinstance(m, Exl3Linear) and m.out_dtype in (torch.bfloat16, torch.float16) for m in model.modules()
    )
