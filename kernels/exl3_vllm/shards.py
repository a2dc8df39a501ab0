"""Which part of a stored linear one tensor-parallel rank holds: whole 128-blocks, or a refusal.

The transforms of EXL3 act on 128 features at a time on either side, so a linear may be cut between blocks and nowhere
else: a cut inside one would load and compute nonsense without an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from exl3_kernels.weight import BLOCK, TILE
from exl3_vllm.stored import StoredLinear, tensor_shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The rows and columns of one stored linear that one rank holds, and the widths its model sees.

    Parameters
    ----------
    stored : StoredLinear
        The whole.
    rows : slice
        Of the stored input features.
    columns : tuple of slice
        Of the stored output features, side by side in this order.
    in_width, out_width : int
        The model's widths: inputs are zero-extended to the rows, outputs beyond the width are padding.
    """

    stored: StoredLinear
    rows: slice
    columns: tuple[slice, ...]
    in_width: int
    out_width: int

    @property
    def in_features(self) -> int:
        """Rows held."""
        return self.rows.stop - self.rows.start

    @property
    def out_features(self) -> int:
        """Columns held."""
        return sum(columns.stop - columns.start for columns in self.columns)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that this rank holds."""
        return tensor_shapes(self.in_features, self.out_features, self.stored.bits)

    def cut(self, suffix: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole stored `trellis`, `suh`, `svh` or `bias`."""
        if suffix == "suh":
            return tensor[self.rows]
        if suffix == "trellis":
            tensor = tensor[self.rows.start // TILE : self.rows.stop // TILE]
            pieces = [tensor[:, columns.start // TILE : columns.stop // TILE] for columns in self.columns]
            return torch.cat(pieces, dim=1) if len(pieces) > 1 else pieces[0]
        pieces = [tensor[columns] for columns in self.columns]
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def window(stored: int, width: int, rank: int, ranks: int, what: str) -> slice:
    """Return the features of one side that a rank holds.

    Parameters
    ----------
    stored : int
        Features in the file.
    width : int
        Features that the rank's layer has.
    rank, ranks : int
        `ranks` of 1 means that this side is not cut; it may then be padded by less than a block. Where fewer pieces
        than ranks exist (shared KV heads), neighbouring ranks hold the same piece.
    what : str
        Named in the refusal.

    Raises
    ------
    ValueError
        If the widths do not fit, or a cut would fall inside a 128-block.
    """
    if ranks == 1:
        if not width <= stored < width + BLOCK:
            raise ValueError(f"{what}: the model expects {width} features, {stored} are stored")
        return slice(0, stored)
    if width % BLOCK:
        raise ValueError(
            f"{what}: {ranks} ranks would hold {width} features each, which is not a multiple of {BLOCK} "
            "(the block of EXL3's transforms): use fewer ranks"
        )
    pieces = stored // width
    if stored % width or pieces > ranks or ranks % pieces:
        raise ValueError(f"{what}: {stored} stored features do not divide into {width} on each of {ranks} ranks")
    index = rank * pieces // ranks
    return slice(index * width, (index + 1) * width)


def columns_of(stored: int, widths: Sequence[int], rank: int, ranks: int, what: str) -> tuple[slice, ...]:
    """Return the output features that a rank holds of a linear whose outputs are one or several of the model's parts.

    Errors as in `window`; `widths` are per rank.
    """
    if ranks == 1 or len(widths) == 1:
        return (window(stored, sum(widths), rank, ranks, what),)
    if stored != ranks * sum(widths):
        raise ValueError(f"{what}: {stored} stored features are not {ranks} times {list(widths)}")
    pieces, start = [], 0
    for width in widths:
        piece = window(ranks * width, width, rank, ranks, what)
        pieces.append(slice(start + piece.start, start + piece.stop))
        start += ranks * width
    return tuple(pieces)


def group_widths(stored: Sequence[int], widths: Sequence[int], ranks: int, what: str) -> list[list[int]]:
    """Say which of a fused layer's outputs each stored linear provides.

    Parameters
    ----------
    stored : sequence of int
        Output features of the stored linears, in order.
    widths : sequence of int
        The layer's outputs per rank, in order; a stored linear may provide several neighbours.

    Returns
    -------
    list of list of int
        Indexes into `widths`, one list per stored linear.

    Raises
    ------
    ValueError
        If they do not line up.
    """
    if len(stored) == len(widths):
        return [[index] for index in range(len(widths))]
    groups: list[list[int]] = []
    index = 0
    for size in stored:
        group: list[int] = []
        while index < len(widths) and ranks * sum(widths[i] for i in [*group, index]) <= size:
            group.append(index)
            index += 1
        groups.append(group)
    if index != len(widths) or not all(groups):
        raise ValueError(f"{what}: stored outputs {list(stored)} do not line up with the model's {list(widths)}")
    return groups
