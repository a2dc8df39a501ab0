"""The CUDA sources compile, from Ampere to Blackwell."""

import subprocess

import pytest

from exl3_kernels.cuda import FLAGS, SOURCES, UNITS, find_nvcc, source_digest

nvcc = find_nvcc()
pytestmark = pytest.mark.skipif(nvcc is None, reason="nvcc is not on the PATH")


@pytest.mark.parametrize(
    ("unit", "architecture"),
    [
        ("linear.o", "sm_80"),
        ("prefill.o", "sm_89"),
        ("wide3.o", "sm_90a"),
        ("reconstruct3.o", "sm_120"),
        ("gemm1.o", "sm_86"),
    ],
)
def test_a_unit_compiles_without_a_warning(unit, architecture, tmp_path):
    source, defines = next((source, defines) for target, source, defines in UNITS if target == unit)
    command = [nvcc, *FLAGS, "-Werror", "all-warnings", f"-arch={architecture}", *defines, "-c", str(SOURCES / source)]
    done = subprocess.run([*command, "-o", str(tmp_path / unit)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_digest_of_the_sources_depends_on_the_architecture():
    assert source_digest(nvcc, "sm_80") != source_digest(nvcc, "sm_90a")
    assert source_digest(nvcc, "sm_90a") == source_digest(nvcc, "sm_90a")
