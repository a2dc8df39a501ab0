"""Arms in a real vLLM: its rows, its tokens and its numbers against this project's own engine on the same weights.

Four processes of vLLM's environment run everything; the tests read what they left.
"""

import importlib.util
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from exl3eval.arm import ArmSpec
from exl3eval.checkpoint.directory import open_checkpoint
from exl3eval.checkpoint.load import checkpoint_digest
from exl3eval.engine.capture import write_hidden
from exl3eval.engine.lanes import Lane
from exl3eval.engine.model import load_arm
from exl3eval.request import PREFILL, reference_variant
from exl3eval.score.scoring import ScoredContext
from exl3eval.suite.tokens import TokenContext, TokenSuite
from exl3eval.variant import load_variant, resolve_variant
from exl3eval.vllm_engine.arms import read_context, run_vllm_arms
from exl3eval.vllm_engine.collect import collect_candidates, collect_scores
from exl3eval.vllm_engine.environment import find_interpreter
from exl3eval.vllm_engine.plan import VllmArm
from exl3eval.vllm_engine.session import VllmSession
from exl3eval.vllm_engine.stack import parse_stack
from exl3eval.vllm_engine.store import context_path

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
TIED = ROOT / "tests/data/qwen2-tied"
SHARED = next(
    (up / "shared/data/checkpoints" for up in ROOT.parents if (up / "shared/data/checkpoints").is_dir()), None
)
NUM_TOKENS, NUM_CONTEXTS, SCORED = 41, 9, 8
ROWS = (1, 2, 5, 8)
CPU = torch.device("cpu")


def decode(rows):
    return Lane(kind="decode", rows=rows, scored=SCORED)


class Quiet:
    """A reporter that tells nobody."""

    def phase(self, label, total, unit):
        from contextlib import nullcontext

        return nullcontext(lambda count: None)


@pytest.fixture(scope="module")
def interpreter():
    if importlib.util.find_spec("vllm"):
        return find_interpreter(None, packages=())
    python = Path(os.environ.get("EXL3EVAL_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
    if not python.exists():
        pytest.skip("vLLM is not installed here: run tools/vllm/install.sh .venv-vllm")
    return find_interpreter(python, packages=())


@pytest.fixture(scope="module")
def tokens():
    generator = np.random.default_rng(5)
    contexts = []
    for index in range(NUM_CONTEXTS):
        ids = generator.integers(3, 1000, NUM_TOKENS).astype(np.int32)
        contexts.append(
            TokenContext(
                id=f"c{index}", cluster=f"d{index}", stratum="s", template="none", digest=f"{index:02d}" * 32, ids=ids
            )
        )
    return TokenSuite(
        suite_digest="0" * 64,
        tokenizer_digest="0" * 64,
        split="analysis",
        seed=0,
        num_tokens=NUM_TOKENS,
        bos_id=None,
        digest="1" * 64,
        contexts=tuple(contexts),
    )


def spec(directory, name):
    checkpoint = open_checkpoint(directory)
    declared = load_variant(name) if checkpoint.is_exl3 else reference_variant(name, "float32")
    return ArmSpec(
        name=name,
        checkpoint=checkpoint,
        checkpoint_sha256=checkpoint_digest(checkpoint),
        declared=declared,
        resolved=resolve_variant(declared, "cpu") if checkpoint.is_exl3 else declared,
        lanes=(),
    )


def session(interpreter, tokens, checkpoint, cache, **options):
    return VllmSession(
        interpreter=interpreter,
        interpreters={},
        inherited=os.environ,
        tokens=tokens,
        vocab_size=1000,
        reference=checkpoint,
        device=CPU,
        machine={"type": "cpu"},
        cache_dir=cache,
        num_processes=2,
        **options,
    )


def transformers_hidden(arm, tokens, folder):
    """Store hidden states of this project's own engine, as a reference for vLLM's logits."""
    model = load_arm(arm.checkpoint, arm.resolved, vocab_size=1000, device=CPU)
    for context in tokens.contexts:
        hidden = model.hidden_states(torch.from_numpy(context.ids[:-1].copy()))
        write_hidden(context_path(folder, context.digest), hidden, {})
    return folder


def kl_of(outcome, tokens):
    return torch.cat([read_context(outcome.rows, context.digest).divergences.kl for context in tokens.contexts])


@pytest.fixture(scope="module")
def plain(interpreter, tokens, tmp_path_factory):
    """The BF16 weights in FP32: vLLM's rows in every lane, scored against transformers."""
    cache = tmp_path_factory.mktemp("plain")
    arm = spec(TIED / "bf16", "reference")
    hidden = transformers_hidden(arm, tokens, cache / "transformers")
    lanes = (PREFILL, Lane(kind="chunked", rows=16), *(decode(rows) for rows in ROWS))
    own = VllmArm(name="reference", spec=arm, mode="eager", lanes=(PREFILL,), is_reference=True)
    whole = VllmArm(name="plain", spec=arm, mode="eager", lanes=lanes)
    forced = VllmArm(name="forced", spec=arm, mode="eager", lanes=(decode(1), decode(5)))
    shared = session(interpreter, tokens, arm.checkpoint, cache)
    return (
        run_vllm_arms([own], shared, Quiet())
        | run_vllm_arms([whole], shared, Quiet(), reference_hidden=hidden)
        | run_vllm_arms([forced], replace(shared, style="forced"), Quiet(), reference_hidden=hidden)
    )


@pytest.fixture(scope="module")
def quantized(interpreter, tokens, tmp_path_factory):
    """An upstream EXL3 checkpoint through the plugin, scored against this project's engine on the same weights."""
    cache = tmp_path_factory.mktemp("quantized")
    arm = spec(TIED / "exl3-mcg-5bpw", "base")
    hidden = transformers_hidden(arm, tokens, cache / "transformers")
    run = VllmArm(name="base", spec=arm, mode="eager", lanes=(PREFILL, decode(5)))
    return run_vllm_arms([run], session(interpreter, tokens, arm.checkpoint, cache), Quiet(), reference_hidden=hidden)


@pytest.mark.parametrize("lane", ["prefill", "chunked[16]", *(f"decode[{rows}]" for rows in ROWS)])
def test_fp32_logits_of_vllm_are_those_of_transformers(plain, tokens, lane):
    """FP32 sums in another order: 1e-9 nats is 100 times what was seen, and 1e-5 of the smallest effect of interest."""
    kl = kl_of(plain["plain", lane], tokens)
    assert len(kl) == NUM_CONTEXTS * (SCORED if lane.startswith("decode") else NUM_TOKENS - 1)
    assert 0 < kl.mean() <= 1e-9


@pytest.mark.parametrize("rows", ROWS)
def test_a_decode_lane_gives_the_head_exactly_its_rows(plain, rows):
    batches = -(-NUM_CONTEXTS // rows)
    assert plain["plain", f"decode[{rows}]"].head_rows == {rows: batches * SCORED}


def test_chunks_and_prefill_give_the_head_the_rows_declared(plain):
    assert plain["plain", "prefill"].head_rows == {1: NUM_CONTEXTS, NUM_TOKENS - 2: NUM_CONTEXTS}
    assert plain["plain", "chunked[16]"].head_rows == {16: 2 * NUM_CONTEXTS, 7: NUM_CONTEXTS, 1: NUM_CONTEXTS}


@pytest.mark.parametrize("rows", [1, 5])
def test_forced_decode_is_scored_on_the_held_out_tokens(plain, tokens, rows):
    """The engine samples exactly the held-out ids, or the process refuses; its logits are transformers'."""
    outcome = plain["forced", f"decode[{rows}]"]
    assert outcome.head_rows == {rows: -(-NUM_CONTEXTS // rows) * SCORED}
    assert kl_of(outcome, tokens).mean() <= 1e-9


def test_everything_is_repeatable(plain, quantized):
    assert {outcome.capture.repeat_difference for outcome in (plain | quantized).values()} == {0.0}


def test_replay_of_the_reference_is_exact_to_fp32_rounding(plain, tokens):
    assert kl_of(plain["reference", "prefill"], tokens).mean() <= 1e-10


def test_the_engine_says_what_it_runs(plain):
    effective = plain["plain", "prefill"].identity["effective"]
    assert effective["prefix_caching"] is False
    assert (effective["dtype"], effective["compile_mode"], effective["tensor_parallel"]) == ("float32", "NONE", 1)
    assert effective["attention"] and effective["runner"]["version"] in ("V1", "V2")
    assert effective["max_num_batched_tokens"] >= 8 * (NUM_TOKENS - 1 - SCORED)


def test_exl3_in_vllm_is_exl3_in_this_engine(quantized, tokens):
    for outcome in quantized.values():
        assert kl_of(outcome, tokens).mean() <= 1e-9


def test_launches_of_the_plugin_are_the_lane_s_rows(quantized):
    """A prefill step also asks the head for one row to sample from; a decode lane sees its rows and its prefix."""
    buckets = {launch.rows_bucket for launch in quantized["base", "decode[5]"].capture.launches}
    assert buckets == {5, 256}
    assert {launch.route for launch in quantized["base", "prefill"].capture.launches} == {"reference"}
    assert quantized["base", "prefill"].identity["plugin"]["dispatches"] == ["1-:reference"]


def test_scores_and_candidates_are_laid_out_as_by_the_own_engine(plain, tokens):
    lane = decode(5)
    first = lane.first_scored(NUM_TOKENS - 1)
    contexts = [
        ScoredContext(name=c.id, cluster=c.cluster, stratum=c.stratum, ids_digest=c.digest, ids=c.ids, first=first)
        for c in tokens.contexts
    ]
    arms = {"reference": plain["reference", "prefill"], "plain": plain["plain", lane.name]}
    scores = collect_scores(arms, contexts, reference="reference")
    assert [placed.context for placed in scores.placed] == [context.name for context in contexts]
    assert all(len(placed.divergences.kl) == len(placed.targets) == SCORED for placed in scores.placed)
    assert scores.grids == {"reference": None, "plain": None}
    assert 0 < scores.cut_mass["plain"] < 1
    candidates = collect_candidates(arms, contexts[:2])
    assert candidates.num_rows == 2 * 2 * SCORED
    ids = {name: [row["ids"][0] for row in candidates.to_pylist() if row["arm"] == name] for name in arms}
    assert ids["reference"] == ids["plain"]


def test_finished_contexts_are_not_run_again(interpreter, tokens, tmp_path):
    arm = spec(TIED / "bf16", "reference")
    shared = session(interpreter, tokens, arm.checkpoint, tmp_path)
    own = VllmArm(name="reference", spec=arm, mode="eager", lanes=(PREFILL,), is_reference=True)
    first = run_vllm_arms([own], shared, Quiet())["reference", "prefill"]
    damaged = context_path(first.rows, tokens.contexts[3].digest)
    damaged.write_bytes(damaged.read_bytes()[:-7])
    again = run_vllm_arms([own], shared, Quiet())["reference", "prefill"]
    assert (first.capture.resumed, again.capture.resumed) == (0, NUM_CONTEXTS - 1)
    assert torch.equal(kl_of(first, tokens), kl_of(again, tokens))


def test_a_stack_of_somebody_else_runs_on_its_own_evidence(interpreter, tokens, tmp_path):
    """The plugin, declared as if it were foreign: its variables, its plugin, and three proofs that it engaged."""
    arm = spec(TIED / "exl3-mcg-5bpw", "base")
    hidden = transformers_hidden(arm, tokens, tmp_path / "transformers")
    stack = parse_stack(
        {
            "environment": {"EXL3_VLLM_VARIANT": '{"linear": "1-:reference", "tally": true}'},
            "plugins": ["exl3"],
            "packages": ["exl3_vllm"],
            "evidence": [
                {"log": "quantization=exl3"},
                {"counter": "exl3_vllm:read_counts"},
                {"kernels": "^exl3", "minimum": 9},
            ],
        },
        where="fork.toml",
    )
    run = VllmArm(name="fork", spec=arm, mode="eager", lanes=(decode(5),), stack=stack)
    found = run_vllm_arms(
        [run], session(interpreter, tokens, arm.checkpoint, tmp_path), Quiet(), reference_hidden=hidden
    )
    outcome = found["fork", "decode[5]"]
    assert kl_of(outcome, tokens).mean() <= 1e-9
    assert [each["count"] >= each["minimum"] for each in outcome.identity["evidence"]] == [True] * 3
    assert outcome.identity["environment"]["EXL3_VLLM_VARIANT"] == stack.environment["EXL3_VLLM_VARIANT"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama/exl3-mcg-4bpw", "qwen3/exl3-mul1-6bpw"])
def test_upstream_s_other_checkpoints_are_scored_alike(interpreter, tokens, tmp_path, name):
    if SHARED is None:
        pytest.skip("upstream's other checkpoints are not here")
    arm = spec(SHARED / name, "base")
    hidden = transformers_hidden(arm, tokens, tmp_path / "transformers")
    run = VllmArm(name="base", spec=arm, mode="eager", lanes=(PREFILL, decode(8)))
    found = run_vllm_arms(
        [run], session(interpreter, tokens, arm.checkpoint, tmp_path), Quiet(), reference_hidden=hidden
    )
    assert [kl_of(outcome, tokens).mean() <= 1e-9 for outcome in found.values()] == [True, True]


@pytest.mark.slow
def test_a_compiled_arm_takes_the_same_routes_and_gives_the_same_numbers(interpreter, tokens, tmp_path):
    arm = spec(TIED / "exl3-mcg-5bpw", "base")
    hidden = transformers_hidden(arm, tokens, tmp_path / "transformers")
    shared = session(interpreter, tokens, arm.checkpoint, tmp_path)
    runs = [
        VllmArm(name=mode, spec=arm, mode=mode, lanes=(PREFILL, decode(1), decode(5))) for mode in ("eager", "compiled")
    ]
    found = run_vllm_arms(runs, shared, Quiet(), reference_hidden=hidden)
    for lane in ("prefill", "decode[1]", "decode[5]"):
        eager, compiled = found["eager", lane], found["compiled", lane]
        assert compiled.capture.launches == eager.capture.launches
        assert kl_of(compiled, tokens).mean() <= 1e-9
    assert found["compiled", "prefill"].identity["effective"]["compile_mode"] not in (None, "NONE")
