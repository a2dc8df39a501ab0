"""What is checked: routes on a device, what each promises, and how far the suite goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from exl3_kernels import gpu_routes, linear  # noqa: F401  these register the routes
from exl3_kernels.portable import interpreted
from exl3_kernels.routes import ROUTES, Route
from exl3_kernels.weight import CODEBOOKS, Exl3Weight
from exl3eval.errors import UsageError
from exl3eval.kernel_check.samples import make_weight

CONTROLS = ("broken-window",)

Arithmetic = Literal["rotated", "dense32", "dense16", "half16", "e4m3"]
Shape = tuple[int, int, int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a route promises.

    Parameters
    ----------
    arithmetic : str
        `rotated`: rows rotated and rounded to float16, exact inner weights, fp32 sums. `dense32`, `dense16`: rows times
        the dense weight rounded to fp32 or float16. `half16`: the weight transformed on its wider side and rounded to
        float16, rows or sums rotated for the other. `e4m3`: weights and rows in eight bits.
    row_bits : bool
        A row's bits do not depend on the rows beside it.
    rounds_once : bool
        A float16 or bfloat16 result is the rounded fp32 result.
    family : str
        Routes of one family give equal bits; empty for a route alone.
    specialised : bool
        Its code depends on the row count.
    """

    arithmetic: Arithmetic = "rotated"
    row_bits: bool = False
    rounds_once: bool = True
    family: str = ""
    specialised: bool = False


TRAITS = {
    "reference": Traits(arithmetic="dense32"),
    "fp16-staged": Traits(),
    "rotated-fp16": Traits(),
    "broken-window": Traits(),
    "decode-gemm": Traits(row_bits=True, family="decode", specialised=True),
    "shared-decode": Traits(row_bits=True, family="decode", specialised=True),
    "wide-decode": Traits(row_bits=True, specialised=True),
    "prefill-reconstruct": Traits(specialised=True),
    "prefill-fused": Traits(arithmetic="dense16", rounds_once=False, specialised=True),
    "prefill-half": Traits(arithmetic="half16", rounds_once=False, specialised=True),
    "fp8-prefill": Traits(arithmetic="e4m3", specialised=True),
    "fp8-prefill-tensor": Traits(arithmetic="e4m3", specialised=True),
    # Interpreted, its products are numpy's, whose sums may depend on a row's place.
    "triton-decode": Traits(row_bits=not interpreted(), specialised=True),
    "triton-reconstruct": Traits(specialised=True),
    "exllamav3": Traits(rounds_once=False, specialised=True),
    "exllamav3-int8": Traits(arithmetic="e4m3", specialised=True),
    "exllamav3-reconstruct": Traits(rounds_once=False, specialised=True),
    "exllamav3-fused": Traits(arithmetic="dense16", rounds_once=False, specialised=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A route on a device, or a route with a deliberate fault.

    Parameters
    ----------
    run : callable
        `(x [M, k], weight, out_dtype) -> [M, n]`.
    rejects : callable
        `(weight, rows) -> str`, empty when it accepts.
    """

    name: str
    run: Callable[[torch.Tensor, Exl3Weight, torch.dtype], torch.Tensor]
    rejects: Callable[[Exl3Weight, int], str]
    device: torch.device
    traits: Traits

    def one_hot_rows(self, scope: Scope) -> tuple[int, ...]:
        """Return the row counts at which it decodes weights one-hot."""
        if self.traits.row_bits:
            return scope.one_hot_rows
        return scope.one_hot_few if self.traits.specialised else scope.one_hot_few[-1:]

    def rows(self, candidates: Sequence[int], weight: Exl3Weight) -> list[int]:
        """Return the row counts among the candidates that it serves."""
        return [rows for rows in candidates if not self.rejects(weight, rows)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """How far the suite goes.

    Parameters
    ----------
    one_hot : (k, n)
        Of the weights that are decoded value by value.
    one_hot_rows, one_hot_few : tuple of int
        Row counts at which they are decoded: by routes that promise a row's bits at every count, by other kernels;
        by torch routes at the last one.
    bits, directed_codebooks : tuple
        K of every decoding check, and the codebooks of the directed bit patterns.
    shapes : tuple of (k, n, bits, codebook)
        Of the products.
    wrong_weight : (k, n, bits, codebook)
        Of the product in which one wrong weight must be seen.
    rows : tuple of int
        Each compared with the same rows in one call of `whole_rows`.
    repeats : int
        Of the same call.
    expert_flips : int
        Flipped bits of routed experts that must be seen.
    typed_rows : tuple of int
        Row counts at which every combination of types is tried.
    """

    one_hot: tuple[int, int]
    one_hot_rows: tuple[int, ...]
    one_hot_few: tuple[int, ...]
    bits: tuple[int, ...]
    directed_codebooks: tuple[str, ...]
    shapes: tuple[Shape, ...]
    wrong_weight: Shape
    rows: tuple[int, ...]
    edge_rows: tuple[int, ...]
    whole_rows: int
    repeats: int
    expert_flips: int = 20
    typed_rows: tuple[int, ...] = (1, 5, 16, 33, 130)


SHAPES: tuple[Shape, ...] = (
    (384, 256, 3, "3inst"),
    (1024, 768, 4, "mul1"),
    (2048, 768, 6, "mcg"),
    (5120, 1024, 5, "mcg"),
)
EDGE_ROWS = (31, 32, 33, 63, 64, 65, 127, 128, 129, 144, 145, 191, 192, 193, 255, 256, 257)
FULL_GPU = Scope(
    one_hot=(128, 256),
    one_hot_rows=(*range(1, 18), 24, 25, 32, 33, 64, 65, 127, 128, 129, 192, 193, 256, 257),
    one_hot_few=(1, 2, 8, 16, 17, 33, 64, 129, 128),
    bits=tuple(range(1, 9)),
    directed_codebooks=CODEBOOKS,
    shapes=SHAPES,
    wrong_weight=(5120, 1024, 4, "mul1"),
    rows=tuple(range(1, 129)),
    edge_rows=EDGE_ROWS,
    whole_rows=300,
    repeats=100,
)
QUICK_GPU = Scope(
    one_hot=(128, 256),
    one_hot_rows=(1, 8, 16, 17, 33, 65, 129, 193),
    one_hot_few=(16, 128),
    bits=(1, 3, 4, 6, 8),
    directed_codebooks=("mcg",),
    shapes=SHAPES[:2],
    wrong_weight=(5120, 512, 4, "mul1"),
    rows=(1, 2, 3, 8, 16, 17, 64, 128),
    edge_rows=(31, 33, 127, 129, 193, 257),
    whole_rows=300,
    repeats=20,
)
FULL_CPU = Scope(
    one_hot=(128, 128),
    one_hot_rows=(1, 100),
    one_hot_few=(100,),
    bits=tuple(range(1, 9)),
    directed_codebooks=CODEBOOKS,
    shapes=SHAPES[:2],
    wrong_weight=(5120, 256, 4, "mul1"),
    rows=tuple(range(1, 129)),
    edge_rows=(127, 128, 129),
    whole_rows=130,
    repeats=100,
)
QUICK_CPU = Scope(
    one_hot=(128, 128),
    one_hot_rows=(1, 100),
    one_hot_few=(100,),
    bits=(1, 3, 8),
    directed_codebooks=("mcg",),
    shapes=SHAPES[:1],
    wrong_weight=(5120, 128, 4, "mul1"),
    rows=(1, 2, 3, 17),
    edge_rows=(31, 33),
    whole_rows=40,
    repeats=5,
)
INTERPRETED = replace(
    QUICK_CPU,
    one_hot_rows=(100,),
    bits=tuple(range(1, 9)),
    shapes=((128, 256, 3, "3inst"), (256, 128, 6, "mul1")),
    rows=(1, 2, 17, 65),
    edge_rows=(63, 64),
    whole_rows=66,
    repeats=2,
    expert_flips=2,
    typed_rows=(1, 65),
)


def scope_of(device: torch.device, *, quick: bool) -> Scope:
    """Return how far to go on a device; not far where Triton interprets its kernels, one program after the other."""
    if device.type == "cuda":
        return QUICK_GPU if quick else FULL_GPU
    if interpreted():
        return replace(INTERPRETED, bits=QUICK_CPU.bits, shapes=INTERPRETED.shapes[:1]) if quick else INTERPRETED
    return QUICK_CPU if quick else FULL_CPU


def subject_of(route: Route, device: torch.device) -> Subject:
    """Bind a registered route to a device."""

    def run(x: torch.Tensor, weight: Exl3Weight, out_dtype: torch.dtype) -> torch.Tensor:
        return route.run(x, weight, None, out_dtype)

    return Subject(
        name=route.name,
        run=run,
        rejects=lambda weight, rows: route.rejects(weight, rows, weight.trellis.device.type),
        device=device,
        traits=TRAITS.get(route.name, Traits(specialised=True)),
    )


def subjects_on(device: torch.device, names: Sequence[str] | None = None) -> list[Subject]:
    """Return the registered routes that serve an ordinary weight on a device.

    Raises
    ------
    UsageError
        If a named route does not exist or does not serve it.
    """
    plain = make_weight(128, 128, 4, "mcg", device=device)
    reasons = {name: route.rejects(plain, 1, device.type) for name, route in ROUTES.items()}
    for name in names or ():
        if reasons.get(name, "no such route"):
            raise UsageError(
                f"route {name!r} cannot be checked on {device.type}: {reasons.get(name, 'no such route')}",
                hint=f"routes here: {', '.join(sorted(name for name, reason in reasons.items() if not reason))}",
            )
    return [
        subject_of(route, device)
        for name, route in ROUTES.items()
        if not reasons[name] and (not names or name in names)
    ]


def altered(subject: Subject, fault: str, run: Callable[..., torch.Tensor]) -> Subject:
    """Return the subject with a fault: `run(subject's own run, x, weight, out_dtype)`."""
    return Subject(
        name=f"{subject.name} with {fault}",
        run=partial(run, subject.run),
        rejects=subject.rejects,
        device=subject.device,
        traits=subject.traits,
    )
