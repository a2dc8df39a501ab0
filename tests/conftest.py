"""Tests run in parallel, one core each: torch gets one thread. Marks say what else a test needs."""

import pytest
import torch

from exl3_kernels.portable import interpreted

torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("interpreter") and not interpreted():
            item.add_marker(pytest.mark.skip(reason="needs TRITON_INTERPRET=1: make interpreter"))
