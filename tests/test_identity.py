"""What a run was: the machine's part of it, kernels as built included."""

from types import SimpleNamespace

import pytest
import torch

from exl3_kernels import cuda
from exl3eval import identity


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    properties = SimpleNamespace(name="NVIDIA Test", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(identity, "_driver_version", lambda: "1.2")
    return torch.device("cuda", 0)


def test_the_built_library_is_part_of_the_device(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(architecture="sm_90a", source_sha256="5" * 64, binary_sha256="b" * 64)
    monkeypatch.setattr(cuda, "unavailable", lambda device: "")
    monkeypatch.setattr(cuda, "load_library", lambda device: library)
    assert identity.device_identity(gpu)["kernels"] == vars(library)


def test_a_gpu_without_a_compiler_has_no_kernels_and_says_so(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "unavailable", lambda device: "no nvcc")
    found = identity.device_identity(gpu)
    assert (found["name"], found["compute_capability"], found["kernels"]) == ("NVIDIA Test", "9.0", None)
