"""Lanes: the linears see the rows that a lane promises, and the same ids give the same distribution in each."""

from pathlib import Path

import pytest
import torch
from tiny_models import VOCAB, llama_tensors, tiny_config, write_model

from exl3eval.checkpoint.directory import open_checkpoint
from exl3eval.engine.capture import capture_arm
from exl3eval.engine.lanes import Lane, parse_integers, parse_lanes, threshold_rows
from exl3eval.engine.model import ArmModel, load_arm
from exl3eval.errors import UsageError
from exl3eval.variant import Variant

BASE = Variant(name="base", doc="x", activations="float32", linear="1-:reference", embedding="stored")
LENGTH = 20
CONTEXTS = [(f"{index:x}" * 64, torch.arange(index, index + LENGTH) * 11 % VOCAB) for index in range(1, 8)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ArmModel:
    directory = write_model(tmp_path_factory.mktemp("model"), llama_tensors(tiny_config()), tiny_config())
    return load_arm(open_checkpoint(directory), BASE, vocab_size=VOCAB, device=torch.device("cpu"))


def _capture(model: ArmModel, cache: Path, lane: Lane, num_threads: int = 1):
    return capture_arm(
        model,
        CONTEXTS,
        lane=lane,
        contract={"lane": lane.name},
        cache_dir=cache,
        fresh=False,
        num_threads=num_threads,
        on_context=lambda n: None,
    )


@pytest.mark.parametrize(
    "lane",
    [
        Lane(kind="chunked", rows=1),
        Lane(kind="chunked", rows=7),
        Lane(kind="chunked", rows=64),
        Lane(kind="decode", rows=1, scored=6),
        Lane(kind="decode", rows=3, scored=6),
        Lane(kind="decode", rows=9, scored=19),
    ],
)
def test_every_lane_reaches_the_states_of_one_prefill(model: ArmModel, tmp_path: Path, lane: Lane) -> None:
    """Another order of sums moves a state by rounding; a wrong position, cache or mask moves it by its own size."""
    whole, fed = _capture(model, tmp_path, Lane(kind="prefill")), _capture(model, tmp_path, lane)
    for digest, _ in CONTEXTS:
        expected = whole.hidden_states(digest)[lane.first_scored(LENGTH) :]
        seen = fed.hidden_states(digest)
        assert seen.shape == expected.shape
        assert torch.allclose(seen, expected, rtol=0, atol=1e-4 * expected.abs().max())
    assert fed.repeat_difference == 0.0


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 16])
def test_decode_linears_see_exactly_m_rows(model: ArmModel, tmp_path: Path, rows: int) -> None:
    """Apart from the prefix (15 tokens a context), every launch has M rows: 5 steps a batch, 7 linears each."""
    capture = _capture(model, tmp_path, Lane(kind="decode", rows=rows, scored=5))
    batches = -(-len(CONTEXTS) // rows)
    by_rows: dict[int, int] = {}
    for launch, count in capture.launches.items():
        by_rows[launch.rows_bucket] = by_rows.get(launch.rows_bucket, 0) + count
    prefix = rows * 15 if rows * 15 <= 16 else 1 << (rows * 15 - 1).bit_length()
    assert by_rows.pop(rows) == batches * 5 * 7
    assert by_rows == {prefix: batches * 7}


def test_a_lane_resumes_by_whole_batches(model: ArmModel, tmp_path: Path) -> None:
    lane = Lane(kind="decode", rows=3, scored=5)
    first = _capture(model, tmp_path, lane)
    victim = sorted(first.directory.glob("*.safetensors"))[4]
    victim.unlink()
    again = _capture(model, tmp_path, lane, num_threads=2)
    assert again.resumed == len(CONTEXTS) - 3
    assert again.launches == first.launches
    assert victim.exists()


def test_names_and_folders() -> None:
    lanes = parse_lanes(["prefill", "chunked", "decode"], rows=[1, 4], chunks="64", decode_positions=8)
    assert [lane.name for lane in lanes] == ["prefill", "chunked[64]", "decode[1]", "decode[4]"]
    assert [lane.slug for lane in lanes] == ["prefill", "chunked-64", "decode-1", "decode-4"]
    assert [lane.head_rows for lane in lanes] == [None, None, 1, 4]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"kinds": ["prefil"]}, "unknown lane 'prefil'"),
        ({"kinds": ["prefill", "prefill"]}, "asked for twice"),
        ({"kinds": ["decode"], "rows": [1, 1]}, "asked for twice"),
        ({"kinds": ["decode"], "rows": [0]}, "with 0 rows"),
        ({"kinds": ["chunked"], "chunks": "4;5"}, "--chunks is '4;5'"),
        ({"kinds": ["decode"], "decode_positions": 0}, "with 0 rows or positions"),
        ({"kinds": ["prefill"], "chunks": None, "decode_positions": None}, "--rows is for decode lanes"),
        ({"kinds": ["prefill"], "rows": None, "decode_positions": None}, "--chunks is for chunked lanes"),
        ({"kinds": ["chunked"], "rows": None}, "--decode-positions is for decode lanes"),
    ],
)
def test_malformed_lanes_are_refused(arguments: dict[str, object], reason: str) -> None:
    usual = {"rows": [1], "chunks": "8", "decode_positions": 4}
    with pytest.raises(UsageError, match=reason):
        parse_lanes(**{**usual, **arguments})  # type: ignore[arg-type]


def test_rows_on_the_command_line_are_whole_numbers() -> None:
    assert parse_integers(" 1, 16 ", "--rows") == [1, 16]
    with pytest.raises(UsageError, match="--rows is 'one'"):
        parse_integers("one", "--rows")


def test_rows_reach_both_sides_of_every_threshold() -> None:
    assert threshold_rows(["1-:reference"]) == [1, 2, 4, 8, 16]
    dispatches = ["1-16:decode-gemm,17-:shared-decode", "1-128:shared-decode,129-:prefill-reconstruct"]
    assert threshold_rows(dispatches) == [1, 2, 4, 8, 16, 17, 128, 129]
    assert threshold_rows(["1-512:shared-decode,513-:prefill-reconstruct"]) == [1, 2, 4, 8, 16]


def test_graphs_replay_decode_steps_only_and_need_a_gpu(model: ArmModel, tmp_path: Path) -> None:
    lane = Lane(kind="decode", rows=2, scored=4, graph=True)
    assert (lane.name, lane.slug) == ("decode[2,graph]", "decode-2-graph")
    with pytest.raises(UsageError, match="CUDA graphs need a GPU"):
        _capture(model, tmp_path, lane)
    with pytest.raises(UsageError, match="'prefill' under CUDA graphs"):
        Lane(kind="prefill", graph=True)


def test_a_decode_lane_needs_a_prefix() -> None:
    with pytest.raises(UsageError, match=r"lane decode\[1\] scores 20 of 20 positions"):
        Lane(kind="decode", rows=1, scored=20).first_scored(20)
