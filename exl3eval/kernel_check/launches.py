"""Properties 16 to 18 and 23 to 26: repeats, graphs, streams, devices and memory around a call."""

from __future__ import annotations

import hashlib
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache

import torch

from exl3_kernels.routes import ROUTES
from exl3_kernels.weight import Exl3Weight
from exl3_kernels.workspace import release_workspaces
from exl3eval.kernel_check.decoding import count_differing
from exl3eval.kernel_check.finding import Evidence, Skipped
from exl3eval.kernel_check.samples import make_rows, make_weight
from exl3eval.kernel_check.subject import Scope, Subject, subjects_on

NEEDS_GPU = Skipped(reason="a property of CUDA launches")
GRAPH_ROWS = (1, 2, 4, 8, 16, 128)
REPEATED = (1024, 768, 4, "mul1")
REPEATED_ON_CPU = (256, 128, 4, "mul1")
POISON = 0xFF  # NaN in every float type
CANARY = 0xA5
POOLED_SIZES = (1 << 29, *(1 << 20,) * 64)  # the allocator keeps blocks of up to 1 MiB apart from larger ones
POISONED_SIZES = (8 << 20, 2 << 20, (1 << 20) + 512, 1 << 20, 128 << 10, 16 << 10, 2 << 10, 512)  # 512 is the least


def graph_replay(subject: Subject, scope: Scope) -> Evidence | Skipped:
    """Property 16: a captured call replayed on new inputs has the bits of an eager one.

    Between replays the captured result is filled with NaN and the allocator is churned.
    """
    if not _captures(subject):
        return Skipped(reason="torch routes, which are no kernels of their own, are not captured")
    weight = _repeated_weight(subject)
    differ = cases = 0
    for rows in subject.rows(GRAPH_ROWS, weight):
        x = make_rows(rows, weight.in_features, device=subject.device)
        held = x.clone()
        subject.run(held, weight, torch.float16)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = subject.run(held, weight, torch.float16)
        for seed in (1, 2, 3):
            x = make_rows(rows, weight.in_features, device=subject.device, seed=seed)
            expected = subject.run(x, weight, torch.float16)
            poison_memory(subject.device)
            held.copy_(x)
            captured.fill_(float("nan"))
            graph.replay()
            differ += count_differing(captured, expected)
            cases += captured.numel()
    return Evidence(
        checked=f"rows {GRAPH_ROWS}, three new inputs each, captured result NaN before", cases=cases, worst=differ
    )


def first_call_in_capture(subject: Subject, scope: Scope) -> Evidence | Skipped:
    """Property 16: a kind of call that was never made outside a capture is refused inside one."""
    if not _captures(subject):
        return Skipped(reason="only CUDA kernels must be primed")
    weight = make_weight(128, 128, 7, "3inst", device=subject.device, bias=torch.float32)
    x = make_rows(1, 128, device=subject.device).float()
    refused = False
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            subject.run(x.clone(), weight, torch.bfloat16)
    except RuntimeError as error:
        refused = "graph capture" in str(error)
    torch.cuda.synchronize(subject.device)
    return Evidence(
        checked="a first launch inside a capture raises",
        cases=1,
        worst=float(not refused),
        measure="captures not refused",
    )


def launch_contract(subject: Subject, scope: Scope) -> Evidence | Skipped:
    """Property 17: calls leave operands as they were; on a GPU repeated calls reserve no new memory."""
    weight = _repeated_weight(subject)
    rows = subject.rows((1, 16, 130), weight)
    inputs = [make_rows(count, weight.in_features, device=subject.device) for count in rows]
    before = [_digest(t) for t in (*_operands(weight), *inputs)]
    for x in inputs:
        subject.run(x, weight, torch.float16)
    segments = _segments(subject.device)
    for _ in range(3):
        for x in inputs:
            subject.run(x, weight, torch.float16)
    broken = sum(a != _digest(t) for a, t in zip(before, (*_operands(weight), *inputs), strict=True))
    return Evidence(
        checked="SHA-256 of weight and rows before and after; device memory reserved over nine repeated calls",
        cases=len(before) + 1,
        worst=broken + abs(_segments(subject.device) - segments),
        measure="changed operands and new reservations",
    )


def repeats(subject: Subject, scope: Scope) -> Evidence | Skipped:
    """Property 18: the same call again and again, other calls in between."""
    weight, other = _repeated_weight(subject), make_weight(256, 384, 6, "mcg", device=subject.device)
    differ = cases = 0
    for rows in subject.rows((1, 16, 33, 130), weight):
        x, between = (make_rows(rows, w.in_features, device=subject.device) for w in (weight, other))
        first = subject.run(x, weight, torch.float32)
        for _ in range(scope.repeats):
            subject.run(between, other, torch.float32)
            again = subject.run(x, weight, torch.float32)
            differ += count_differing(again, first)
            cases += again.numel()
    return Evidence(checked=f"{scope.repeats} repeats with another call between", cases=cases, worst=differ)


def another_process(subject: Subject, scope: Scope) -> Evidence | Skipped:
    """Property 18: a second process gives the same bits."""
    if subject.name not in ROUTES:
        return Skipped(reason="not a registered route")
    theirs = _digests_elsewhere(str(subject.device), torch.get_num_threads())
    differ = output_digest(subject) != theirs[subject.name]
    return Evidence(
        checked="SHA-256 of results in two processes", cases=1, worst=float(differ), measure="differing digests"
    )


def poisoned_scratch(subject: Subject, scope: Scope) -> Evidence | Skipped:
    """Property 23: memory that a call is handed holds NaN, which no result may depend on.

    The call allocates from a pool of its own, filled before, in which nothing else lives.
    """
    if subject.device.type != "cuda":
        return Skipped(reason="torch's CPU allocator gives no control over what memory holds")
    differ = cases = 0
    for shape in scope.shapes:
        weight = make_weight(*shape, device=subject.device, bias=torch.float16)
        for rows in subject.rows((1, 3, 16, 17, 130), weight):
            x = make_rows(rows, weight.in_features, device=subject.device)
            expected = subject.run(x, weight, torch.float32)
            release_workspaces()
            pool = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(pool, subject.device):
                poisoned = [_poisoned(size, subject.device) for size in POOLED_SIZES]
                del poisoned
                if not torch.empty(rows, weight.out_features, device=subject.device).isnan().all():
                    return Skipped(reason="the allocator did not hand poisoned memory back", status="not run")
                got = subject.run(x, weight, torch.float32)
                release_workspaces()
            differ += count_differing(got, expected)
            cases += expected.numel()
    return Evidence(checked="everything that a call allocates held NaN before", cases=cases, worst=differ)


def canaries(subject: Subject, scope: Scope) -> Evidence | Skipped:
    """Property 24: memory around the result keeps its bytes.

    Blocks of the result's size are filled with a pattern and every second one is freed, so that the result lies
    between two that are watched.
    """
    if subject.device.type != "cuda":
        return Skipped(reason="torch's CPU allocator gives no control over neighbours")
    weight = _repeated_weight(subject)
    changed = cases = 0
    for rows in subject.rows((1, 7, 16, 33, 130), weight):
        for dtype in (torch.float16, torch.float32):
            x = make_rows(rows, weight.in_features, device=subject.device)
            size = rows * weight.out_features * dtype.itemsize
            blocks = [torch.full((size,), CANARY, dtype=torch.uint8, device=subject.device) for _ in range(32)]
            freed = {block.data_ptr() for block in blocks[1::2]}
            watched = blocks[::2]
            del blocks
            y = subject.run(x, weight, dtype)
            torch.cuda.synchronize(subject.device)
            changed += sum(int((block != CANARY).sum()) for block in watched)
            cases += y.data_ptr() in freed
    return Evidence(
        checked="results that lie between watched blocks",
        cases=cases,
        worst=changed,
        measure="bytes changed around results",
    )


def two_streams(subject: Subject, scope: Scope) -> Evidence | Skipped:
    """Property 25: calls on two streams at once give what they give one after another."""
    if subject.device.type != "cuda":
        return NEEDS_GPU
    weights = [make_weight(2048, 768, bits, "mcg", device=subject.device, seed=bits) for bits in (4, 6)]
    streams = [torch.cuda.Stream(subject.device) for _ in weights]
    differ = cases = 0
    for rows in subject.rows((16, 130), weights[0]):
        x = make_rows(rows, 2048, device=subject.device)
        expected = [subject.run(x, weight, torch.float32) for weight in weights]
        torch.cuda.synchronize(subject.device)
        got: list[tuple[int, torch.Tensor]] = []
        for _ in range(20):
            for at, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    got.append((at, subject.run(x, weights[at], torch.float32)))
        torch.cuda.synchronize(subject.device)
        differ += sum(count_differing(y, expected[at]) for at, y in got)
        cases += len(got)
    return Evidence(checked="two weights, 20 calls on each of two streams, interleaved", cases=cases, worst=differ)


def other_device(subject: Subject, scope: Scope) -> Evidence | Skipped:
    """Property 26: operands on a GPU that is not the current one."""
    if subject.device.type != "cuda":
        return NEEDS_GPU
    if torch.cuda.device_count() < 2:
        return Skipped(reason="one GPU is visible", status="not run")
    weight, there = _repeated_weight(subject), torch.device("cuda", 1 - (subject.device.index or 0))
    x = make_rows(16, weight.in_features, device=subject.device)
    expected = subject.run(x, weight, torch.float32)
    moved = make_weight(*REPEATED, device=there, bias=torch.float16)
    with torch.cuda.device(subject.device):
        got = subject.run(x.to(there), moved, torch.float32)
    return Evidence(
        checked="the same call on another GPU",
        cases=got.numel(),
        worst=count_differing(got.to(subject.device), expected),
    )


def output_digest(subject: Subject) -> str:
    """Return the SHA-256 of a route's fp32 results for seeded rows."""
    weight = _repeated_weight(subject)
    digest = hashlib.sha256()
    for rows in subject.rows((1, 16, 33, 130), weight):
        x = make_rows(rows, weight.in_features, device=subject.device)
        digest.update(subject.run(x, weight, torch.float32).cpu().numpy().tobytes())
    return digest.hexdigest()


def output_digests(device: str, threads: int) -> dict[str, str]:
    """Return `output_digest` of every registered route: what the second process computes."""
    torch.set_num_threads(threads)
    return {subject.name: output_digest(subject) for subject in subjects_on(torch.device(device))}


def poison_memory(device: torch.device) -> None:
    """Fill all memory that the caching allocator may serve the next calls from with NaN.

    Two large blocks are taken, then smaller ones until each size no longer fits into what is already reserved, so
    that the gaps between live tensors are filled too; then all are given back.
    """
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    held = [_poisoned(1 << 28, device) for _ in range(2)]
    for size in POISONED_SIZES:
        reserved = torch.cuda.memory_reserved(device)
        block = _poisoned(size, device)
        while torch.cuda.memory_reserved(device) == reserved:
            held.append(block)
            block = _poisoned(size, device)
        del block
        torch.cuda.empty_cache()
    torch.cuda.synchronize(device)


def _poisoned(size: int, device: torch.device) -> torch.Tensor:
    return torch.full((size,), POISON, dtype=torch.uint8, device=device)


@lru_cache(maxsize=4)
def _digests_elsewhere(device: str, threads: int) -> dict[str, str]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(output_digests, device, threads).result()


def _captures(subject: Subject) -> bool:
    return subject.device.type == "cuda" and subject.traits.specialised


def _repeated_weight(subject: Subject) -> Exl3Weight:
    shape = REPEATED if subject.device.type == "cuda" else REPEATED_ON_CPU
    return make_weight(*shape, device=subject.device, bias=torch.float16)


def _operands(weight: Exl3Weight) -> list[torch.Tensor]:
    return [t for t in (weight.trellis, weight.suh, weight.svh, weight.bias) if t is not None]


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()


def _segments(device: torch.device) -> int:
    return torch.cuda.memory_stats(device)["segment.all.allocated"] if device.type == "cuda" else 0
