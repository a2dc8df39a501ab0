"""Floors: zero where the same bits must come, above zero where something really moved, and told apart by name."""

import numpy as np
import pytest
import torch
from tiny_models import VOCAB, llama_tensors, tiny_config, write_model

from exl3eval.checkpoint.directory import open_checkpoint
from exl3eval.engine.lanes import Lane
from exl3eval.engine.model import ArmModel, load_arm
from exl3eval.floors import (
    BATCH_SHAPE,
    CHUNK_SPLIT,
    EAGER_GRAPH,
    REPLAY_LIVE,
    SELF_NOISE,
    FloorContext,
    floor_means,
    label_floor,
    measure_floors,
)
from exl3eval.score.positions import Placed, build_table, split_arms
from exl3eval.variant import Variant

BASE = Variant(name="base", doc="x", activations="float32", linear="1-:reference", embedding="stored")
IDS = [np.arange(start, start + 25, dtype=np.int64) * 11 % VOCAB for start in (1, 50, 99)]
CONTEXTS = [FloorContext(name=f"c{i}", cluster=f"k{i}", stratum="s", ids=ids) for i, ids in enumerate(IDS)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ArmModel:
    directory = write_model(tmp_path_factory.mktemp("model"), llama_tensors(tiny_config()), tiny_config())
    return load_arm(open_checkpoint(directory), BASE, vocab_size=VOCAB, device=torch.device("cpu"))


def _means(placed: list[Placed]) -> dict[str, dict[str, float]]:
    return floor_means(split_arms(build_table(placed)))


def _measure(model: ArmModel, lane: Lane, *, is_reference: bool = False) -> list[Placed]:
    return measure_floors(model, CONTEXTS, lane=lane, is_reference=is_reference, num_threads=2)


def test_a_prefill_has_every_floor_and_its_own_noise(model: ArmModel) -> None:
    placed = _measure(model, Lane(kind="prefill"), is_reference=True)
    assert {each.arm for each in placed} == {BATCH_SHAPE, CHUNK_SPLIT, REPLAY_LIVE, SELF_NOISE}
    assert all(len(each.divergences.kl) == len(each.targets) == 24 for each in placed)
    means = {floor: next(iter(arms.values())) for floor, arms in _means(placed).items()}
    assert means[REPLAY_LIVE] == 0.0
    assert 0.0 <= means[CHUNK_SPLIT] < 1e-9
    assert 0.0 < means[SELF_NOISE] < 1e-9
    assert model.hidden_states(torch.arange(9)).equal(model.hidden_states(torch.arange(9)))


def test_the_noise_leaves_the_model_as_it_was(model: ArmModel) -> None:
    before = model.hidden_states(torch.arange(9))
    _measure(model, Lane(kind="prefill"), is_reference=True)
    assert model.hidden_states(torch.arange(9)).equal(before)


def test_a_decode_lane_without_a_gpu_has_no_replay(model: ArmModel) -> None:
    placed = _measure(model, Lane(kind="decode", rows=3, scored=5), is_reference=True)
    assert {each.arm for each in placed} == {BATCH_SHAPE}
    assert EAGER_GRAPH not in _means(placed)
    assert all(each.first == 19 and len(each.targets) == 5 for each in placed)


def test_a_floor_sees_an_arm_that_depends_on_its_batch(model: ArmModel, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ArmModel.run_lane

    def leaking(self: ArmModel, ids_BT: torch.Tensor, lane: Lane) -> torch.Tensor:
        return whole(self, ids_BT, lane) * (1.0 + 0.01 * (len(ids_BT) - 1))

    monkeypatch.setattr(ArmModel, "run_lane", leaking)
    means = _means(_measure(model, Lane(kind="decode", rows=2, scored=5)))
    assert next(iter(means[BATCH_SHAPE].values())) > 1e-7


def test_means_are_by_floor_and_arm(model: ArmModel) -> None:
    from dataclasses import replace

    placed = _measure(model, Lane(kind="chunked", rows=7))
    labelled = [replace(each, arm=label_floor(each.arm, arm)) for each in placed for arm in ("base", "variant")]
    means = _means(labelled)
    assert set(means) == {BATCH_SHAPE, CHUNK_SPLIT}
    assert set(means[CHUNK_SPLIT]) == {"base", "variant"}
