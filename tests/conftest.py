"""Tests run in parallel, one core each: torch gets one thread."""

import torch

torch.set_num_threads(1)
