"""The wrong thing measured, or nothing at all: each mistake is made here, and is refused or seen."""

import ast
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import synthetic_runs
import torch

from exl3_kernels import operands
from exl3_kernels.routes import Launch
from exl3eval.arm import ArmRecord, ArmSpec, check_engagement
from exl3eval.compare import Resampling, check_sanity, summarise_arm
from exl3eval.engine.capture import Capture
from exl3eval.engine.head import Head
from exl3eval.engine.lanes import Lane
from exl3eval.engine.model import EmbeddingBytes
from exl3eval.errors import InvalidRunError, UsageError
from exl3eval.gate.evidence import read_run
from exl3eval.gate.policy import MarginRule, Policy
from exl3eval.records import digest_value, seal, write_json
from exl3eval.request import REFERENCE, shared_head_name
from exl3eval.score.divergence import AGREE, FLIP, measure_divergences
from exl3eval.score.positions import Placed, build_table, split_arms
from exl3eval.transformers_run import _scored_arm, check_identical_head
from exl3eval.variant import Variant

ROOT = Path(__file__).parents[2]
FUSED = Launch("fp16-staged", 1, 256, 128, 4, "mcg")
PLAIN = Launch("reference", 128, 256, 128, 4, "mcg")
VARIANT = Variant(
    name="fused",
    doc="x",
    activations="float32",
    linear="1-8:fp16-staged,9-:reference",
    embedding="stored",
    requires=("fp16-staged",),
)


def record(launches: dict[Launch, int], variant: Variant = VARIANT, lane: Lane | None = None) -> ArmRecord:
    lane = lane or Lane(kind="prefill")
    spec = ArmSpec(
        name=variant.name, checkpoint=None, checkpoint_sha256="0", declared=variant, resolved=variant, lanes=(lane,)
    )
    return ArmRecord(
        spec=spec,
        lane=lane,
        capture=Capture(directory=Path(), launches=launches, resumed=0, repeat_difference=0.0),
        launches=launches,
        embedding_bytes=EmbeddingBytes(stored=0, run=0),
        attention="sdpa",
    )


def two_logits(seed: int = 0, rows: int = 8, vocab: int = 400) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    reference = 2.0 * torch.randn(rows, vocab, generator=generator)
    return reference, reference + 0.3 * torch.randn(rows, vocab, generator=generator)


def test_a_claim_about_a_route_with_no_launches_is_invalid() -> None:
    """M1: two prefills were compared, and the agreement was claimed for a decode graph that never ran."""
    with pytest.raises(InvalidRunError, match="declares route `fp16-staged`, which launched 0 times in lane prefill"):
        check_engagement(record({PLAIN: 96}))
    check_engagement(record({PLAIN: 96, FUSED: 12}))
    with pytest.raises(InvalidRunError, match="forbids route `reference`, which launched 96 times"):
        check_engagement(record({PLAIN: 96, FUSED: 12}, replace(VARIANT, forbids=("reference",))))


def test_every_kind_of_launch_is_primed_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """M2: one warm-up per device let another width set itself up inside a capture, and decode replayed garbage."""
    monkeypatch.setattr(operands, "_launched", set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    operands.require_primed("decode", "cuda:0", 4)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    operands.require_primed("decode", "cuda:0", 4)
    for other in (("decode", "cuda:0", 5), ("decode", "cuda:1", 4), ("prefill", "cuda:0", 4)):
        with pytest.raises(RuntimeError, match="inside a graph capture"):
            operands.require_primed(*other)


def test_a_dispatch_that_changed_no_launch_is_not_evidence(tmp_path: Path) -> None:
    """M3: a change of decode rows was shipped on a prefill, which runs the same kernels with and without it."""
    synthetic_runs.write_run(tmp_path, synthetic_runs.build_arms(noise=0.0))
    receipt = json.loads((tmp_path / "receipt.json").read_text())
    changed = receipt["identity"]["arms"]["variant"]
    assert changed["launches"] == receipt["identity"]["arms"]["base"]["launches"]
    for form in ("declared", "resolved"):
        changed[form]["linear"] = "1-127:fp16-staged,128-:reference"
        changed[form]["embedding"] = receipt["identity"]["arms"]["base"][form]["embedding"]
    receipt["identity_digest"] = digest_value(receipt["identity"])
    write_json(tmp_path / "receipt.json", seal(receipt))
    with pytest.raises(InvalidRunError, match="launch"):
        read_run(tmp_path)


def test_every_arm_is_scored_through_the_head_that_it_serves() -> None:
    """M7: one head on both sides cancelled the error of the quantized head."""
    heads = {name: Head(module=torch.nn.Identity(), vocab_size=4) for name in (REFERENCE, "fused")}
    session = SimpleNamespace(device=torch.device("cpu"))
    assert VARIANT.head == "own"
    assert _scored_arm(session, record({}), heads).head is heads["fused"]
    asked = record({}, replace(VARIANT, head="reference"))
    assert _scored_arm(session, asked, heads).head is heads[REFERENCE]


def test_equal_heads_must_read_exactly_alike_in_both_head_lanes() -> None:
    """M7, the other way round: a difference between the lanes of one head would be the harness's own."""
    reference, arm = two_logits()
    own, shared = torch.nn.Linear(4, 5, bias=False), torch.nn.Linear(4, 5, bias=False)
    shared.load_state_dict(own.state_dict())
    heads = [Head(module=module, vocab_size=5) for module in (own, shared)]

    def table(moved: float):
        found = measure_divergences(reference, {"a": arm, "b": arm + moved * two_logits(seed=1)[0]}, torch.zeros(8))
        return build_table([place("fused", found["a"]), place(shared_head_name("fused"), found["b"])])

    check_identical_head(table(0.0), "fused", *heads)
    with pytest.raises(InvalidRunError, match="differs from itself scored through the reference's head"):
        check_identical_head(table(1e-3), "fused", *heads)


def place(arm: str, divergences) -> Placed:
    targets = torch.zeros(len(divergences.kl), dtype=torch.int32).numpy()
    return Placed(arm=arm, context="c", cluster="d", stratum="s", first=0, targets=targets, divergences=divergences)


def test_a_renormalised_top_20_bounds_nothing_and_is_not_what_is_measured() -> None:
    """M9: on the 20 likeliest ids alone the figure may lie on either side of the divergence."""
    reference, arm = two_logits(rows=64)
    found = measure_divergences(reference, {"arm": arm}, torch.zeros(64))["arm"].kl
    log_p, log_q = (logits.double().log_softmax(dim=1) for logits in (reference, arm))
    exact = (log_p.exp() * (log_p - log_q)).sum(dim=1)
    top = reference.topk(20, dim=1).indices
    short_p, short_q = (log.gather(1, top).log_softmax(dim=1) for log in (log_p, log_q))
    top20 = (short_p.exp() * (short_p - short_q)).sum(dim=1)
    assert torch.allclose(found, exact, rtol=1e-11, atol=1e-14)
    assert 5 < int((top20 < exact).sum()) < 59


def test_a_proxy_may_rise_where_the_divergence_falls_and_is_no_endpoint() -> None:
    """M10: hidden-state error steered an allocation, which lost what the proxy promised to win."""
    hidden, head = torch.eye(4)[:1] * 8.0, torch.eye(4) * torch.tensor([1.0, 1.0, 0.0, 0.0])[:, None]
    unseen, seen = hidden + torch.tensor([[0.0, 0.0, 3.0, 0.0]]), hidden - torch.tensor([[2.0, 0.0, 0.0, 0.0]])
    assert float((unseen - hidden).square().mean()) > float((seen - hidden).square().mean())
    logits = {name: states @ head for name, states in (("unseen", unseen), ("seen", seen))}
    kl = {name: float(d.kl) for name, d in measure_divergences(hidden @ head, logits, torch.zeros(1)).items()}
    assert kl["unseen"] == 0.0 < kl["seen"]
    for proxy in ("hidden_mse", "proxy_err"):
        with pytest.raises(UsageError, match=f"has margins for .*{proxy}"):
            Policy(name="p", doc="", margins={proxy: MarginRule(absolute=1e-3)})


def test_a_broken_model_is_no_data_point() -> None:
    """M12: mean KL of 12.35 nats and no agreement at all were tabled like any other figure."""
    arms = synthetic_runs.build_arms(num_contexts=8, num_positions=4, changes={"wrong": 0.0, "flat": 0.0})
    arms["wrong"]["top1"] = (torch.arange(32) % 2 == 0).numpy() * (FLIP - AGREE) + AGREE
    arms["wrong"]["top1"][0:2] = FLIP
    arms["flat"]["entropy_arm"][:] = 6.9
    tables = split_arms(synthetic_runs.build_table(arms))
    summaries = {n: summarise_arm(n, t, Resampling(seed=1, num_resamples=99)) for n, t in tables.items()}
    check_sanity([summaries["base"]], 1000)
    with pytest.raises(InvalidRunError, match="`wrong` agrees with the reference's top id at 4"):
        check_sanity([summaries["base"], summaries["wrong"]], 1000)
    with pytest.raises(InvalidRunError, match="`flat` is nearly uniform"):
        check_sanity([summaries["flat"]], 1000)


def test_no_environment_variable_is_read_outside_the_settings() -> None:
    """M42, M13: one variable was a threshold in one build and a switch in another, and no receipt held it."""
    readers = set()
    for folder in ("exl3eval", "kernels"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute | ast.Name) and ast.unparse(node) in ("os.environ", "os.getenv"):
                    readers.add(path.relative_to(ROOT).as_posix())
    assert readers == {"exl3eval/settings.py", "kernels/exl3_vllm/settings.py"}
