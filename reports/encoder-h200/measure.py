"""Time the torch trellis encoder on a GPU, compare its states with the CPU's, and its error with the published table.

python reports/encoder-h200/measure.py OUT.json
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch

from exl3_kernels.codebook import codebook_values
from exl3_kernels.encode import encode_tiles
from exl3_kernels.weight import CODEBOOKS
from exl3eval.identity import code_identity, device_identity
from exl3eval.records import write_receipt

RMS = {"3inst": 1.24371088, "mcg": 1.24371088, "mul1": 1.0}
SCALE = {"3inst": 0.88, "mcg": 0.88, "mul1": 0.92}
GPU = torch.device("cuda")


def tiles(count: int, codebook: str, seed: int) -> torch.Tensor:
    """Draw unit Gaussian tiles at the codebook's usual scale: float32 [count, 256]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 256, generator=generator) * (RMS[codebook] * SCALE[codebook])


def time_encoder(bits: int, codebook: str) -> dict[str, float]:
    """Median speed of five runs over 4,096 tiles, after one to warm up."""
    batch = tiles(4096, codebook, 0).to(GPU)
    seconds = []
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        encode_tiles(batch, bits, codebook, encoder="torch")
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[1:])
    return {
        "median_s": median,
        "spread_s": max(seconds[1:]) - min(seconds[1:]),
        "weights_per_s": batch.numel() / median,
    }


def compare(bits: int, codebook: str) -> dict[str, float | bool]:
    """Whether GPU and CPU find the same states on 16 tiles, and the squared error on 512."""
    few = tiles(16, codebook, 1)
    many = tiles(512, codebook, 2)
    decoded = (
        codebook_values(codebook, device=GPU)[encode_tiles(many.to(GPU), bits, codebook, encoder="torch").long()]
        .float()
        .cpu()
    )
    return {
        "same_states": torch.equal(
            encode_tiles(few, bits, codebook), encode_tiles(few.to(GPU), bits, codebook, encoder="torch").cpu()
        ),
        "nmse": float(((decoded - many) ** 2).sum() / (many**2).sum()),
    }


def main() -> None:
    """Measure and write the receipt."""
    receipt = {
        "schema": "exl3eval/encoder-receipt/1",
        "code": code_identity(),
        "device": device_identity(GPU),
        "speed": {f"mcg.K{bits}": time_encoder(bits, "mcg") for bits in (2, 3, 4, 5, 6, 8)},
        "agreement": {f"{codebook}.K{bits}": compare(bits, codebook) for codebook in CODEBOOKS for bits in range(1, 9)},
    }
    write_receipt(Path(sys.argv[1]), receipt)
    for name, speed in receipt["speed"].items():
        print(f"{name}: {speed['weights_per_s'] / 1e6:.2f} M weights/s")
    print("states equal:", all(entry["same_states"] for entry in receipt["agreement"].values()))


if __name__ == "__main__":
    main()
