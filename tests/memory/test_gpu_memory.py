"""Memory on a GPU: the allocator agrees with the tensors, the cap holds, a captured step has its pool."""

from pathlib import Path

import pytest
import torch
from tiny_models import llama_tensors, tiny_config, write_model

from exl3eval.memory.budget import OWN_CAP
from exl3eval.memory.measure import MemoryRequest, measure_memory
from exl3eval.memory.meter import CudaMeter
from exl3eval.memory.receipt import build_receipt
from exl3eval.progress import TerminalReporter

pytestmark = pytest.mark.gpu
ROUNDING = 64 << 10


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config()
    return write_model(tmp_path_factory.mktemp("tiny"), llama_tensors(config), config)


def receipt_of(**changes: object) -> dict:
    request = MemoryRequest(**{"positions": 64, "decode_positions": 8, "device": "cuda", **changes})
    return build_receipt(measure_memory(request, num_threads=1, reporter=TerminalReporter(quiet=True)))


def rows_of(receipt: dict) -> dict[tuple[str, str], float | None]:
    return {(row["section"], row["name"]): row["bytes"] for row in receipt["results"]["rows"]}


def test_garbage_is_counted_until_the_meter_settles() -> None:
    class Cycle:
        pass

    meter = CudaMeter(torch.device("cuda"))
    meter.settle()
    before = meter.read().held
    cycle = Cycle()
    cycle.own, cycle.block = cycle, torch.ones(1 << 24, device="cuda")
    del cycle
    assert meter.read().held - before == 4 << 24
    meter.settle()
    assert meter.read().held == before


def test_the_allocator_agrees_with_the_tensors_of_a_loaded_arm(directory: Path) -> None:
    rows = rows_of(receipt_of(model=directory))
    resident = rows["weights", "all, resident"]
    slack = rows["held", "load, by the allocator"] - resident
    assert 0 <= slack < (64 << 20)
    assert rows["key-value cache", "per token, by its tensors"] == rows["key-value cache", "per token, by the formula"]
    assert rows["peak", "load, held"] >= resident
    assert rows["activations", "prefill"] > 0
    assert rows["held", "CUDA graph pool of one decode step"] > 0


def test_the_saving_of_the_int8_embedding_is_the_allocators() -> None:
    base, int8 = (rows_of(receipt_of(variant=name)) for name in ("base", "int8-embed"))
    expected = base["weights", "embedding, resident"] - int8["weights", "embedding, resident"]
    measured = base["held", "load, by the allocator"] - int8["held", "load, by the allocator"]
    assert expected > 0 and abs(measured - expected) <= ROUNDING


def test_a_budget_that_is_too_small_is_our_limit_not_the_cards() -> None:
    results = receipt_of(budget=24 << 20, positions=1024)["results"]
    assert results["outcome"]["fits"] is False and results["outcome"]["limit"] == OWN_CAP
    assert results["budget"]["binds_first"] is True
    assert torch.ones(1 << 24, device="cuda").sum() == 1 << 24, "the cap outlived the measurement"


def test_a_budget_that_fits_bounds_what_is_reserved() -> None:
    budget = 4 << 30
    receipt = receipt_of(budget=budget)
    assert receipt["results"]["outcome"]["fits"] is True
    assert max(phase["busy"]["peak_reserved"] for phase in receipt["results"]["phases"]) <= budget
