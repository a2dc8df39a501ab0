"""The benchmark's arithmetic and record, from invented measurements; the measuring itself needs a GPU."""

import json

import pytest
import typer
from typer.testing import CliRunner

from exl3_kernels.dispatch import parse_table
from exl3eval.errors import UsageError
from exl3eval.kernel_bench.commands import register
from exl3eval.kernel_bench.geometry import GEOMETRIES, Geometry, parse_geometry
from exl3eval.kernel_bench.measure import Measurement
from exl3eval.kernel_bench.report import Peer, build_record, read_peer, render_markdown, roofline_us, write_bench
from exl3eval.kernel_bench.timing import Timing
from exl3eval.kernel_bench.tune import tune
from exl3eval.records import read_receipt, seal

SHAPE = Geometry(name="small", in_features=4096, out_features=4096, bits=4)


def measured(contestant, us, rows=1, codebook="mcg", extra=None):
    timing = Timing(median_us=us, least_us=us - 1, most_us=us + 1)
    return Measurement(
        geometry=SHAPE, codebook=codebook, rows=rows, contestant=contestant, timing=timing, extra_bytes=extra
    )


CELL = [
    measured("dense-fp16", 20.0),
    measured("dense-bf16", 21.0),
    measured("shared-decode", 10.0, extra=1 << 20),
    measured("prefill-fused", 50.0, extra=3 << 20),
    measured("fp8-prefill", 5.0, extra=0),
    measured("load-probe", 6.0),
]


def test_a_geometry_is_a_shipped_name_or_a_shape():
    assert parse_geometry("moe") == GEOMETRIES[-1]
    assert parse_geometry("4096x11008:3").packed_bytes == 4096 * 11008 * 3 // 8
    for bad in ("4096", "4096x100:4", "4096x128:9", "0x128:4", "nothing"):
        with pytest.raises(UsageError, match="neither a shipped one"):
            parse_geometry(bad)


def test_the_record_relates_every_contestant_to_dense_and_to_the_peer(tmp_path):
    peer = tmp_path / "peer.json"
    row = {"k": 4096, "n": 4096, "K": 4, "cb": "mcg", "m": 1, "gemm_us": 25.0, "recon_us": 40.0}
    row["dense_fp16_us"] = 10.0  # their card ran twice as fast
    peer.write_text(json.dumps({"rows": [row]}))
    record = build_record(CELL, read_peer(peer), gpu="NVIDIA H200", identity={"cuda": "13.0"})
    (cell,) = record["cells"]
    assert cell["peer_us"] == 25.0
    assert cell["contestants"]["shared-decode"]["to_dense_fp16"] == 0.5
    assert cell["contestants"]["shared-decode"]["to_peer"] == 0.4
    assert cell["contestants"]["shared-decode"]["to_peer_by_dense"] == 0.2
    assert cell["roofline_us"] == pytest.approx((4096 * 4096 / 2 + 2 * 8192) / 4.8e12 * 1e6)
    assert "synthetic" in record["workload"]
    write_bench(tmp_path / "out", record)
    assert read_receipt(tmp_path / "out/bench.json") == seal(record)
    table = (tmp_path / "out/bench.md").read_text()
    assert table == render_markdown(record)
    assert "| shared-decode | 0.50 | 0.40 | 0.20 | 1.0 |" in table


def test_what_is_unknown_stays_empty():
    record = build_record(CELL, Peer(), gpu="Some GPU", identity={})
    assert record["cells"][0]["peer_us"] is None and record["cells"][0]["roofline_us"] is None
    assert roofline_us(CELL[0], "Some GPU") is None
    assert "| shared-decode | 0.50 |  |  | 1.0 |" in render_markdown(record)
    with pytest.raises(ValueError, match="no dense product"):
        build_record(CELL[2:], Peer(), gpu="Some GPU", identity={})


def test_a_file_that_is_no_peer_file_is_refused(tmp_path):
    bad = tmp_path / "bad.json"
    bad.write_text('{"rows": [{"k": 1}]}')
    with pytest.raises(UsageError, match=r"bad\.json is not a peer file"):
        read_peer(bad)


def test_tuning_averages_codebooks_and_ignores_what_is_no_exact_route():
    measurements = [
        measured("decode-gemm", 10.0),
        measured("fp8-prefill", 1.0),
        measured("dense-fp16", 1.0),
        measured("shared-decode", 30.0, rows=128),
        measured("prefill-fused", 20.0, rows=128),
        measured("shared-decode", 30.0, rows=128, codebook="mul1"),
        measured("prefill-fused", 50.0, rows=128, codebook="mul1"),
    ]
    table = parse_table(tune(measurements, "Some GPU").encode(), where="tuned")
    assert table.gpu == "Some GPU"
    assert table.dispatch_for(4096, 4096, 4) == "1-1:decode-gemm,2-:shared-decode"


def test_the_commands_need_a_gpu_and_say_so(monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    app = typer.Typer()
    register(app)
    for command in ("bench", "tune"):
        result = CliRunner().invoke(app, [command, "--out", str(tmp_path / "out")])
        assert isinstance(result.exception, UsageError)
        assert "no NVIDIA GPU" in str(result.exception)
