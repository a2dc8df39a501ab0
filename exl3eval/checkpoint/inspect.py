"""What a checkpoint stores: one row per module, and totals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from exl3eval.checkpoint.directory import Checkpoint
from exl3eval.checkpoint.headers import DTYPE_BITS, TensorEntry
from exl3eval.checkpoint.modules import EMBEDDING_NAMES, Exl3Module

INVENTORY_SCHEMA = "exl3eval/inventory/1"
INVENTORY_COLUMNS = ("module", "role", "kind", "bits", "codebook", "shape", "bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class InventoryRow:
    """One EXL3 linear, or one plain tensor.

    Parameters
    ----------
    key : str
        Module key of an EXL3 linear, full name of a plain tensor.
    role : str
        `body`, `head`, `mtp` (multi-token prediction) or `embedding` (input table); `other` for a
        plain tensor of no named role.
    kind : str
        `exl3` or `plain`.
    bits : int
        K, or the width of the dtype.
    codebook : str or None
        Codebook of an EXL3 linear.
    dtype : str or None
        Safetensors dtype of a plain tensor.
    shape : tuple of int
        [in, out] of an EXL3 linear, padding included; stored shape of a plain tensor.
    size_bytes : int
        Stored bytes: for an EXL3 linear codes, scales, marker and bias.
    """

    key: str
    role: str
    kind: str
    bits: int
    codebook: str | None
    dtype: str | None
    shape: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """All rows of a checkpoint and what they sum to.

    Parameters
    ----------
    rows : tuple of InventoryRow
        By key.
    body_bits : float or None
        Mean K of the EXL3 linears of the body, weighted by k n; what `bits` of the configuration
        reports. None without such linears.
    body_bpw : float or None
        Codes and scales of those linears in bits, over k n: mean of K + 16/k + 16/n.
    head_bpw : float or None
        The same for the head; the dtype's width where it is plain; None where it is tied.
    exl3_bytes, plain_bytes, embedding_bytes : int
        Stored bytes of all EXL3 linears, of all plain tensors, and of the input embedding among these.
    file_bytes : int
        Size of the weight files, headers included.
    num_exl3, num_plain : int
        Rows of each kind.
    codebook_counts : tuple of (str, int, int)
        (codebook, K, number of linears), sorted.
    notes : tuple of str
        The checkpoint's notes.
    """

    rows: tuple[InventoryRow, ...]
    body_bits: float | None
    body_bpw: float | None
    head_bpw: float | None
    exl3_bytes: int
    plain_bytes: int
    embedding_bytes: int
    file_bytes: int
    num_exl3: int
    num_plain: int
    codebook_counts: tuple[tuple[str, int, int], ...]
    notes: tuple[str, ...]


def inventory(checkpoint: Checkpoint) -> Inventory:
    """Describe every module of a checkpoint and total them; nothing is loaded."""
    exl3_rows = [_exl3_row(module) for module in checkpoint.modules.values()]
    plain_rows = [_plain_row(entry) for entry in checkpoint.plain.values()]
    body = [module for module in checkpoint.modules.values() if module.role == "body"]
    counts = Counter((module.codebook, module.bits) for module in checkpoint.modules.values())
    return Inventory(
        rows=tuple(sorted([*exl3_rows, *plain_rows], key=lambda row: row.key)),
        body_bits=_per_weight((module.bits * module.num_weights, module) for module in body),
        body_bpw=_per_weight((module.weight_bits, module) for module in body),
        head_bpw=_head_bpw(checkpoint, plain_rows),
        exl3_bytes=sum(row.size_bytes for row in exl3_rows),
        plain_bytes=sum(row.size_bytes for row in plain_rows),
        embedding_bytes=sum(row.size_bytes for row in plain_rows if row.role == "embedding"),
        file_bytes=sum(checkpoint.file_bytes.values()),
        num_exl3=len(exl3_rows),
        num_plain=len(plain_rows),
        codebook_counts=tuple((codebook, bits, count) for (codebook, bits), count in sorted(counts.items())),
        notes=checkpoint.notes,
    )


def inventory_json(inventory: Inventory) -> dict[str, Any]:
    """Return an inventory as plain JSON values; it holds no path."""
    return {"schema": INVENTORY_SCHEMA, **asdict(inventory)}


def inventory_rows(inventory: Inventory) -> list[tuple[str, ...]]:
    """Return the rows as text, one cell per entry of `INVENTORY_COLUMNS`."""
    return [
        (
            row.key,
            row.role,
            row.dtype or row.kind,
            str(row.bits),
            row.codebook or "",
            " x ".join(map(str, row.shape)) or "scalar",
            f"{row.size_bytes:,}",
        )
        for row in inventory.rows
    ]


def _exl3_row(module: Exl3Module) -> InventoryRow:
    return InventoryRow(
        key=module.key,
        role=module.role,
        kind="exl3",
        bits=module.bits,
        codebook=module.codebook,
        dtype=None,
        shape=(module.in_features, module.out_features),
        size_bytes=module.nbytes,
    )


def _plain_row(entry: TensorEntry) -> InventoryRow:
    return InventoryRow(
        key=entry.name,
        role=_plain_role(entry.name),
        kind="plain",
        bits=DTYPE_BITS[entry.dtype],
        codebook=None,
        dtype=entry.dtype,
        shape=entry.shape,
        size_bytes=entry.nbytes,
    )


def _plain_role(name: str) -> str:
    if name.startswith("mtp."):
        return "mtp"
    module, _, parameter = f".{name}".rpartition(".")
    if parameter == "weight":
        leaf = module.rpartition(".")[2]
        if leaf == "lm_head":
            return "head"
        if leaf in EMBEDDING_NAMES:
            return "embedding"
    return "other"


def _per_weight(stored: Iterable[tuple[int, Exl3Module]]) -> float | None:
    pairs = list(stored)
    weights = sum(module.num_weights for _, module in pairs)
    return sum(bits for bits, _ in pairs) / weights if weights else None


def _head_bpw(checkpoint: Checkpoint, plain_rows: list[InventoryRow]) -> float | None:
    if checkpoint.head_key is not None:
        head = checkpoint.modules[checkpoint.head_key]
        return head.weight_bits / head.num_weights
    return next((float(row.bits) for row in plain_rows if row.role == "head"), None)
