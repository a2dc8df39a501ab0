"""One small pass over every CUDA and Triton route, for compute-sanitizer: the commands are in README.md."""

import torch

from exl3eval.kernel_check.samples import make_rows, make_weight
from exl3eval.kernel_check.subject import subjects_on

WEIGHTS = ((256, 384, 4, "mcg"), (384, 256, 3, "mul1"), (256, 256, 7, "3inst"))
ROWS = (1, 33, 130)


def main() -> None:
    """Run every route on every weight and row count, and print how many calls that were."""
    device, calls = torch.device("cuda", 0), 0
    for subject in subjects_on(device):
        if not subject.traits.specialised:
            continue
        for k, n, bits, codebook in WEIGHTS:
            weight = make_weight(k, n, bits, codebook, device=device, bias=torch.float16)
            for rows in subject.rows(ROWS, weight):
                y = subject.run(make_rows(rows, k, device=device), weight, torch.float16)
                if not y.isfinite().all():
                    raise SystemExit(f"{subject.name} gave a value that is not finite")
                calls += 1
    torch.cuda.synchronize()
    print("calls", calls)


if __name__ == "__main__":
    main()
