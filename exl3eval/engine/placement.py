"""Putting EXL3 modules where a transformers model has its linears.

The checkpoint speaks upstream's names (one 2-D tensor per projection, one per expert); the model may fuse
projections or hold all experts in one 3-D parameter. Every stored module must find its place, and every
parameter of the model must end up filled: anything left over is an error, never a silent default.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from exl3_kernels.dispatch import dispatch_on
from exl3_kernels.experts import Exl3Experts, Expert
from exl3_kernels.linear import Exl3Linear, FusedExl3Linear, SummedExl3Linear
from exl3_kernels.routes import ROUTES, parse_dispatch
from exl3_kernels.weight import Exl3Weight
from exl3eval.checkpoint.directory import Checkpoint
from exl3eval.checkpoint.load import load_plain, load_weight
from exl3eval.checkpoint.modules import slice_groups
from exl3eval.errors import CheckpointError, UsageError
from exl3eval.variant import MEASURED

FUSIONS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
EXPERT_PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_EXPERT_KEY = re.compile(r"(?P<experts>.+\.experts)\.(?P<index>\d+)\.(?P<projection>\w+)")
_RENAMES = ((".block_sparse_moe.", ".mlp."),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How modules of one checkpoint are loaded.

    Parameters
    ----------
    checkpoint : Checkpoint
        The opened EXL3 directory.
    dispatch : str
        Routes of every linear, or `measured...` for the table of this GPU.
    device : device
        Where tensors go.
    """

    checkpoint: Checkpoint
    dispatch: str
    device: torch.device

    def linear(self, key: str, *, in_features: int | None = None, out_features: int | None = None) -> Exl3Linear:
        """Load the linear stored under `key` with the widths that the model sees.

        Raises
        ------
        CheckpointError
            If the stored widths or the routes do not fit.
        """
        weight = load_weight(self.checkpoint, key, self.device)
        try:
            return Exl3Linear(
                weight,
                dispatch=self._dispatch_of(weight),
                in_features=in_features,
                out_features=out_features,
            )
        except ValueError as error:
            raise CheckpointError(f"{key}: {error}", hint="the configuration belongs to another model?") from error

    def _dispatch_of(self, weight: Exl3Weight) -> str:
        if not self.dispatch.startswith(MEASURED):
            return self.dispatch
        return dispatch_on(self.device, weight.in_features, weight.out_features, weight.bits)


def check_routes(checkpoint: Checkpoint, dispatch: str, device: torch.device) -> None:
    """Refuse routes that a device or a stored module does not suit, from headers alone.

    Raises
    ------
    UsageError
        Naming the route, the module and the reason.
    """
    if dispatch.startswith(MEASURED):
        return
    for module in checkpoint.modules.values():
        k, n = module.in_features, module.out_features
        weight = Exl3Weight(
            trellis=torch.empty(k // 16, n // 16, 16 * module.bits, dtype=torch.int16, device="meta"),
            suh=torch.empty(k, dtype=torch.float16, device="meta"),
            svh=torch.empty(n, dtype=torch.float16, device="meta"),
            codebook=module.codebook,
            multiplier=module.multiplier,
        )
        for row_range in parse_dispatch(dispatch):
            if reason := ROUTES[row_range.route].rejects(weight, row_range.first, device.type):
                raise UsageError(
                    f"route `{row_range.route}` cannot serve {module.key} on {device}: {reason}",
                    hint="choose another --variant or --device; `exl3eval variants` lists the routes",
                )


def dispatches_of(checkpoint: Checkpoint, dispatch: str, device: torch.device) -> set[str]:
    """Return every dispatch that the modules of a checkpoint get: one, or those of the GPU's table."""
    if not dispatch.startswith(MEASURED):
        return {dispatch}
    return {dispatch_on(device, m.in_features, m.out_features, m.bits) for m in checkpoint.modules.values()}


def model_name(name: str) -> str:
    """Translate a checkpoint name to the name that transformers 5 gives the module."""
    for stored, ours in _RENAMES:
        name = name.replace(stored, ours)
    return name


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` at the dotted `name`."""
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, module)


def _widths(module: nn.Module, name: str) -> tuple[int, int]:
    if not isinstance(module, nn.Linear):
        raise CheckpointError(
            f"{name} is stored as EXL3, but the model has a {type(module).__name__} there",
            hint="this architecture is not supported by the transformers engine",
        )
    return module.in_features, module.out_features


def place_exl3_modules(model: nn.Module, placement: Placement) -> None:
    """Replace every linear that the checkpoint stores as EXL3.

    Raises
    ------
    CheckpointError
        If a stored module has no place, or an expert or a fused part is missing.
    """
    checkpoint = placement.checkpoint
    names = {name for name, _ in model.named_modules()}
    left = dict.fromkeys(checkpoint.modules)
    for name, parts in slice_groups(checkpoint.modules).items():
        keys = [part.key for part in parts]
        replace_module(model, model_name(name), _load_slices(model, model_name(name), keys, placement))
        _take(left, keys)
    for key in list(left):
        name = model_name(key)
        if name in names and _EXPERT_KEY.fullmatch(key) is None:
            in_features, out_features = _widths(model.get_submodule(name), name)
            replace_module(model, name, placement.linear(key, in_features=in_features, out_features=out_features))
            _take(left, [key])
    for name in sorted(names):
        parent, _, attribute = name.rpartition(".")
        fused = [f"{parent}.{part}" for part in FUSIONS.get(attribute, ())]
        if fused and all(key in left for key in fused):
            _check_fused(model.get_submodule(name), name, fused, checkpoint)
            replace_module(model, name, FusedExl3Linear([placement.linear(key) for key in fused]))
            _take(left, fused)
    for stored in dict.fromkeys(match["experts"] for key in left if (match := _EXPERT_KEY.fullmatch(key))):
        name = model_name(stored)
        if name in names:
            module, keys = _load_experts(model.get_submodule(name), stored, left, placement)
            replace_module(model, name, module)
            _take(left, keys)
    left = {key: None for key in left if not key.startswith("mtp.")}
    if left:
        raise CheckpointError(
            f"{next(iter(left))}: stored as EXL3, but {type(model).__name__} has no such linear "
            f"({len(left)} modules without a place)",
            hint="the configuration belongs to another model, or transformers names this architecture differently",
        )


def _take(left: dict[str, None], keys: Iterable[str]) -> None:
    for key in keys:
        del left[key]


def _load_slices(model: nn.Module, name: str, keys: list[str], placement: Placement) -> nn.Module:
    in_features, out_features = _widths(model.get_submodule(name), name)
    modules = [placement.checkpoint.modules[key] for key in keys]
    if sum(module.in_features for module in modules) == in_features and len(modules) > 1:
        return SummedExl3Linear([placement.linear(key, out_features=out_features) for key in keys])
    if sum(module.out_features for module in modules) == out_features:
        return FusedExl3Linear([placement.linear(key, in_features=in_features) for key in keys])
    raise CheckpointError(
        f"{name}: {len(keys)} slices do not add up to {in_features} -> {out_features}",
        hint="the configuration belongs to another model?",
    )


def _check_fused(module: nn.Module, name: str, parts: list[str], checkpoint: Checkpoint) -> None:
    _, out_features = _widths(module, name)
    stored = sum(checkpoint.modules[part].out_features for part in parts)
    if stored != out_features:
        raise CheckpointError(
            f"{name}: the stored parts {', '.join(p.rpartition('.')[2] for p in parts)} have {stored} outputs, "
            f"the model expects {out_features}",
            hint="padded parts of a fused projection are not supported",
        )


def _load_experts(
    module: nn.Module, stored: str, left: Iterable[str], placement: Placement
) -> tuple[Exl3Experts, list[str]]:
    found = {key for key in left if key.startswith(f"{stored}.")}
    count = getattr(module, "num_experts", None)
    activation = getattr(module, "act_fn", None)
    if not isinstance(count, int) or not callable(activation):
        raise CheckpointError(
            f"{stored}: {type(module).__name__} does not tell its experts and activation",
            hint="this architecture is not supported by the transformers engine",
        )
    for projections in EXPERT_PROJECTIONS:
        keys = [[f"{stored}.{index}.{projection}" for projection in projections] for index in range(count)]
        if not any(key in found for triple in keys for key in triple):
            continue
        missing = [key for triple in keys for key in triple if key not in found]
        if missing:
            raise CheckpointError(f"{missing[0]} is missing", hint="fetch the whole checkpoint")
        if getattr(module, "has_bias", False) or getattr(module, "_apply_gate", None) not in (
            None,
            _default_gate(module),
        ):
            raise CheckpointError(
                f"{stored}: {type(module).__name__} has expert biases or its own gating",
                hint="this architecture is not supported by the transformers engine",
            )
        hidden, inner = _expert_widths(module)
        experts = [
            Expert(
                placement.linear(gate, in_features=hidden, out_features=inner),
                placement.linear(up, in_features=hidden, out_features=inner),
                placement.linear(down, in_features=inner, out_features=hidden),
            )
            for gate, up, down in keys
        ]
        return Exl3Experts(experts, activation=activation), [key for triple in keys for key in triple]
    raise CheckpointError(
        f"{min(found)}: unknown expert projection", hint="this architecture is not supported by the transformers engine"
    )


def _default_gate(module: nn.Module) -> object:
    from transformers.integrations import moe

    default = getattr(moe, "_default_apply_gate", None)
    return default.__get__(module) if default is not None else None


def _expert_widths(module: nn.Module) -> tuple[int | None, int | None]:
    down = getattr(module, "down_proj", None)
    if not isinstance(down, torch.Tensor) or down.dim() != 3:
        return None, None
    _, hidden, inner = down.shape
    return hidden, inner


def fill_parameters(model: nn.Module, placement: Placement) -> None:
    """Load every tensor that is not EXL3 into the parameter or buffer of its name.

    Tensors take the dtype of the parameter they fill.

    Raises
    ------
    CheckpointError
        If a shape differs, a stored tensor has no place, or a parameter stays empty.
    """
    checkpoint = placement.checkpoint
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for stored in checkpoint.plain:
        name = model_name(stored)
        slot = state.get(name)
        if slot is None:
            if _is_expected_extra(stored, model):
                continue
            raise CheckpointError(
                f"{stored}: stored, but {type(model).__name__} has no such parameter",
                hint="the configuration belongs to another model?",
            )
        tensor = cut_padding(load_plain(checkpoint, stored, placement.device), slot.shape)
        if tensor.shape != slot.shape:
            raise CheckpointError(
                f"{stored} is {list(tensor.shape)}, the model expects {list(slot.shape)}",
                hint="the configuration belongs to another model?",
            )
        parent, _, attribute = name.rpartition(".")
        owner = model.get_submodule(parent)
        value = tensor.to(slot.dtype)
        if attribute in owner._parameters:
            owner._parameters[attribute] = nn.Parameter(value, requires_grad=False)
        else:
            owner._buffers[attribute] = value
    _tie_head(model, checkpoint)
    if empty := [name for name, tensor in model.named_parameters() if tensor.is_meta]:
        raise CheckpointError(
            f"{empty[0]} is in no file ({len(empty)} parameters without a value)", hint="fetch the whole checkpoint"
        )


def cut_padding(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Cut zero padding up to a multiple of 128 that upstream leaves on 16-bit linears."""
    if tensor.dim() != 2 or len(shape) != 2 or tensor.shape == shape:
        return tensor
    padded = all(
        have >= want and have - want < 128 and have % 128 == 0 for have, want in zip(tensor.shape, shape, strict=True)
    )
    return tensor[: shape[0], : shape[1]].contiguous() if padded else tensor


def _is_expected_extra(stored: str, model: nn.Module) -> bool:
    if stored.startswith("mtp.") or stored.endswith((".rotary_emb.inv_freq", ".masked_bias")):
        return True
    return stored.endswith("lm_head.weight") and bool(getattr(model.config, "tie_word_embeddings", False))


def _tie_head(model: nn.Module, checkpoint: Checkpoint) -> None:
    head = model.get_output_embeddings()  # type: ignore[operator]
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    if isinstance(head, nn.Linear) and head.weight.is_meta and checkpoint.tie_word_embeddings:
        head.weight = embedding.weight
