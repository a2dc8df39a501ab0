"""Tests run in parallel, one core each: torch gets one thread. Marks say what else a test needs."""

from importlib.metadata import version

import pytest
import torch

from exl3_kernels.portable import interpreted

torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("interpreter") and (reason := why_not_interpreted()):
            item.add_marker(pytest.mark.skip(reason=reason))


def why_not_interpreted() -> str:
    if not interpreted():
        return "needs TRITON_INTERPRET=1: make interpreter"
    if version("triton").startswith("3.6.") and tuple(map(int, version("numpy").split(".")[:2])) >= (2, 4):
        return "Triton 3.6 interprets with NumPy before 2.4 only"
    return ""
