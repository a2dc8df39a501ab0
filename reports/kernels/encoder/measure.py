"""Time the encoder and gather kernels against torch on one GPU, and compare their results bit for bit.

python reports/kernels/encoder/measure.py OUT.json
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from exl3_kernels.cuda import load_library
from exl3_kernels.embedding import Int8Embedding
from exl3_kernels.encode import encode_tiles
from exl3_kernels.gather import gather_cuda, gather_plain
from exl3_kernels.weight import CODEBOOKS
from exl3eval.identity import code_identity, device_identity
from exl3eval.records import write_receipt

SCALE = {"3inst": 1.09, "mcg": 1.09, "mul1": 0.92}
GPU = torch.device("cuda")
TILES = 4096
STRIP_TILES = (48, 320, 1088)  # the tiles of one strip of 16 rows, for linears 768, 5120 and 17408 wide
GATHERS = [(16, 5120), (8192, 5120), (8192, 2048)]
VOCABULARY = 152064


def gaussian(count: int, codebook: str) -> torch.Tensor:
    """Draw unit Gaussian tiles at the codebook's usual scale: float32 [count, 256]."""
    generator = torch.Generator().manual_seed(count)
    return (torch.randn(count, 256, generator=generator) * SCALE[codebook]).to(GPU)


def seconds(call: Callable[[], object], runs: int) -> dict[str, float]:
    """Median and spread over `runs` timed calls, after one to warm up."""
    call()
    times = []
    for _ in range(runs):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return {"median_s": statistics.median(times), "spread_s": max(times) - min(times)}


def encoder_speed(bits: int, codebook: str, encoder: str, count: int, runs: int) -> dict[str, float]:
    """Time one encoder on `count` tiles."""
    tiles = gaussian(count, codebook)
    time = seconds(lambda: encode_tiles(tiles, bits, codebook, encoder=encoder), runs)
    return {**time, "tiles": count, "weights_per_s": tiles.numel() / time["median_s"]}


def same_states(bits: int, codebook: str) -> bool:
    """Whether both encoders find the same states on 528 tiles."""
    tiles = gaussian(528, codebook)
    kernel, plain = (encode_tiles(tiles, bits, codebook, encoder=encoder) for encoder in ("cuda", "torch"))
    return torch.equal(kernel, plain)


def gather_speed(count: int, width: int) -> dict[str, object]:
    """Time kernel and torch on random ids, bfloat16 out, and compare them."""
    embedding = Int8Embedding(torch.randn(VOCABULARY, width, device=GPU), out_dtype=torch.bfloat16)
    ids = torch.randint(0, VOCABULARY, (count,), device=GPU)
    arguments = (embedding.codes, embedding.scales, ids, torch.bfloat16)
    return {
        "same_bits": torch.equal(gather_cuda(*arguments), gather_plain(*arguments)),
        "kernel": seconds(lambda: gather_cuda(*arguments), 50),
        "torch": seconds(lambda: gather_plain(*arguments), 50),
    }


def main() -> None:
    """Measure and write the receipt."""
    library = load_library(GPU)
    every = range(1, 9)
    receipt = {
        "schema": "exl3eval/encoder-kernel-receipt/1",
        "code": code_identity(),
        "device": device_identity(GPU),
        "library": {"architecture": library.architecture, "binary_sha256": library.binary_sha256},
        "same_states": {f"{codebook}.K{bits}": same_states(bits, codebook) for codebook in CODEBOOKS for bits in every},
        "kernel": {f"mcg.K{bits}": encoder_speed(bits, "mcg", "cuda", TILES, 5) for bits in every},
        "torch": {f"mcg.K{bits}": encoder_speed(bits, "mcg", "torch", 1024, 1) for bits in (2, 4, 6)},
        "strips": {f"mcg.K4.{tiles}": encoder_speed(4, "mcg", "cuda", tiles, 5) for tiles in STRIP_TILES},
        "gather": {f"{count}x{width}": gather_speed(count, width) for count, width in GATHERS},
    }
    write_receipt(Path(sys.argv[1]), receipt)
    for part in ("kernel", "torch", "strips"):
        for name, speed in receipt[part].items():
            print(f"{part} {name}: {speed['weights_per_s'] / 1e6:.2f} M weights/s")
    print("states equal:", all(receipt["same_states"].values()), receipt["same_states"])
    print("gather:", receipt["gather"])


if __name__ == "__main__":
    main()
