"""The plugin in a real vLLM: upstream's checkpoints load, score as in our engine, and take the routes declared.

One process of vLLM's environment runs every job; the tests read what it wrote.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from exl3eval.checkpoint.directory import open_checkpoint
from exl3eval.engine.model import load_arm
from exl3eval.score.divergence import measure_divergences
from exl3eval.variant import load_variant, resolve_variant

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
TIED = ROOT / "tests/data/qwen2-tied"
SHARED = next(
    (up / "shared/data/checkpoints" for up in ROOT.parents if (up / "shared/data/checkpoints").is_dir()), None
)
UPSTREAM = ["llama/exl3-3inst-2bpw", "llama/exl3-mcg-2.5bpw", "qwen3/exl3-mul1-6bpw", "qwen3moe/exl3-mcg-3bpw"]
MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
IDS = [(37 * position + 11) % 1000 for position in range(24)]
DECODE = 8
COUNTED = {"tally": True}
COMPILED = {"enforce_eager": False}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_DISABLE_COMPILE_CACHE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@pytest.fixture(scope="module")
def vllm_python():
    if importlib.util.find_spec("vllm"):
        return sys.executable
    beside = ROOT / ".venv-vllm/bin/python"
    if not beside.exists():
        pytest.skip("vLLM is not installed here: run tools/vllm/install.sh .venv-vllm")
    return str(beside)


def run(vllm_python, script, *arguments, **variables):
    """Run a script in vLLM's environment with declared variables only."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    done = subprocess.run(
        [vllm_python, str(Path(__file__).with_name(script)), *map(str, arguments)],
        env=kept | ENVIRONMENT | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done


def alone(model, folder):
    """A model directory without the recorded logits that lie beside it: vLLM loads every safetensors file."""
    folder.mkdir(parents=True)
    for name in MODEL_FILES:
        (folder / name).symlink_to(model / name)
    return str(folder)


def jobs(folder):
    exl3 = alone(TIED / "exl3-mcg-5bpw", folder / "tied-exl3")
    bf16 = alone(TIED / "bf16", folder / "tied-bf16")
    two_rows = {"linear": "1-8:fp16-staged,9-:reference"}
    yield {"name": "eager", "model": exl3, "variant": COUNTED}
    yield {"name": "compiled", "model": exl3, "variant": COUNTED, "arguments": COMPILED}
    yield {"name": "routed-eager", "model": exl3, "variant": COUNTED | two_rows}
    yield {"name": "routed-compiled", "model": exl3, "variant": COUNTED | two_rows, "arguments": COMPILED}
    yield {"name": "planted-eager", "model": exl3, "variant": COUNTED, "plant": True}
    yield {"name": "planted-compiled", "model": exl3, "variant": COUNTED, "plant": True, "arguments": COMPILED}
    yield {"name": "alias", "model": exl3, "arguments": {"quantization": "exl3-kernels"}}
    yield {"name": "int8", "model": exl3, "variant": COUNTED | {"embedding": "int8"}}
    yield {"name": "tied", "model": bf16}
    yield {"name": "tied-int8", "model": bf16, "variant": COUNTED | {"embedding": "int8"}}
    measured = {"linear": "measured"}
    yield {"name": "no-gpu", "model": exl3, "variant": measured, "refused": True}
    for name in UPSTREAM if SHARED else []:
        model = alone(SHARED / name, folder / name)
        yield {"name": name.replace("/", "-"), "model": model, "variant": COUNTED}
        if "moe" in name:
            yield {"name": "moe-compiled", "model": model, "variant": COUNTED, "arguments": COMPILED}


@pytest.fixture(scope="module")
def served(vllm_python, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    out = folder / "out"
    out.mkdir()
    request = {"out": str(out), "jobs": [{"ids": IDS, "decode": DECODE, **job} for job in jobs(folder / "models")]}
    (folder / "request.json").write_text(json.dumps(request))
    run(vllm_python, "plugin_run.py", folder / "request.json", VLLM_CACHE_ROOT=str(folder / "cache"))
    return out


def record(served, name):
    return json.loads((served / f"{name}.json").read_text())


def logits(served, name):
    return torch.from_numpy(np.load(served / f"{name}.npy"))


def largest_kld(left, right):
    targets = torch.zeros(len(left), dtype=torch.int64)
    return measure_divergences(left, {"arm": right}, targets)["arm"].kl.abs().max().item()


def by_rows(counts):
    total = Counter()
    for route, rows, *_, count in counts:
        total[route, rows] += count
    return dict(total)


def our_logits(model, tokens, variant="base"):
    """Our engine on the same ids, in FP32: the prompt and, teacher-forced, what vLLM generated."""
    torch.set_num_threads(1)
    checkpoint = open_checkpoint(model)
    resolved = resolve_variant(load_variant(variant), "cpu")
    arm = load_arm(checkpoint, resolved, vocab_size=checkpoint.config["vocab_size"], device=torch.device("cpu"))
    with torch.inference_mode():
        return arm.head.logits(arm.hidden_states(torch.tensor([*IDS, *tokens[:-1]])))


@pytest.mark.parametrize(("name", "variant"), [("eager", "base"), ("compiled", "base"), ("int8", "int8-embed")])
def test_logits_are_our_engines(served, name, variant):
    tokens = record(served, name)["tokens"]
    ours, theirs = our_logits(TIED / "exl3-mcg-5bpw", tokens, variant), logits(served, name)
    assert theirs.shape == (len(IDS) + DECODE - 1, ours.shape[1])
    assert largest_kld(ours, theirs) <= 1e-9
    assert theirs[len(IDS) - 1 :].argmax(dim=1).tolist() == tokens


@pytest.mark.parametrize("name", UPSTREAM)
def test_upstream_checkpoints_score_as_in_our_engine(served, name):
    if SHARED is None:
        pytest.skip("upstream's other checkpoints are not on this machine")
    flat = name.replace("/", "-")
    ours = our_logits(SHARED / name, record(served, flat)["tokens"])
    assert largest_kld(ours, logits(served, flat)) <= 1e-9


def test_every_stored_linear_is_served_as_stored(served):
    config = record(served, "eager")["config"]
    described = [part for parts in config["linears"].values() for part in parts]
    modules = open_checkpoint(TIED / "exl3-mcg-5bpw").modules
    assert sorted(text.split()[0] for text in described) == sorted(modules)
    for text in described:
        module = modules[text.split()[0]]
        assert f"K={module.bits}, {module.codebook}, 1-:reference" in text
    assert config["dispatches"] == ["1-:reference"] and config["embeddings"] == {}
    assert config["variant"] == {"linear": "auto", "embedding": "stored", "tally": True}


def test_a_head_that_is_stored_quantized_is_served_beside_a_tied_embedding(served):
    assert "lm_head" in record(served, "eager")["config"]["linears"]


def test_counts_are_those_of_the_launches(served):
    linears, layers = 7, 2
    assert by_rows(record(served, "eager")["counts"]) == {
        # The prompt: every layer's linears once over all rows, the head over the prompt's rows and over the last one.
        ("reference", 32): layers * linears + 1,
        ("reference", 1): (DECODE - 1) * layers * linears + DECODE,
    }


@pytest.mark.parametrize("pair", [("eager", "compiled"), ("routed-eager", "routed-compiled")])
def test_compiled_takes_the_branches_of_eager(served, pair):
    eager, compiled = (record(served, name) for name in pair)
    assert eager["counts"] == compiled["counts"]
    assert torch.equal(logits(served, pair[0]), logits(served, pair[1]))


def test_rows_choose_the_route_inside_the_op(served):
    routes = {(route, rows) for route, rows in by_rows(record(served, "routed-compiled")["counts"])}
    assert routes == {("reference", 32), ("fp16-staged", 1)}


def test_a_branch_planted_outside_the_op_is_caught_by_the_counts_alone(served):
    eager, compiled = (record(served, f"planted-{mode}") for mode in ("eager", "compiled"))
    assert by_rows(eager["counts"])["fp16-staged", 1] == (DECODE - 1) * 14 + DECODE
    # The branch of the trace is served to every decode step; only the head is outside the compiled region.
    assert by_rows(compiled["counts"])["fp16-staged", 1] == DECODE
    assert by_rows(compiled["counts"])["reference", 1] == (DECODE - 1) * 14
    assert eager["tokens"] == compiled["tokens"]


def test_the_alias_serves_the_same(served):
    assert torch.equal(logits(served, "alias"), logits(served, "eager"))


def test_the_overlay_replaces_the_table_and_is_counted(served):
    config = record(served, "int8")["config"]
    ((layer, sizes),) = config["embeddings"].items()
    assert layer == "model.embed_tokens" and sizes["run_bytes"] == sizes["rows"] * (256 + 4)
    counts = by_rows(record(served, "int8")["counts"])
    assert (counts["int8-gather", 32], counts["int8-gather", 1]) == (1, DECODE - 1)


def test_the_overlay_leaves_a_tied_head_alone(served):
    tokens = record(served, "tied-int8")["tokens"]
    assert largest_kld(our_logits(TIED / "bf16", tokens, "int8-embed"), logits(served, "tied-int8")) <= 1e-9
    assert largest_kld(our_logits(TIED / "bf16", record(served, "tied")["tokens"]), logits(served, "tied")) <= 1e-9
    (sizes,) = record(served, "tied-int8")["config"]["embeddings"].values()
    assert sizes["run_bytes"] == sizes["stored_bytes"] + sizes["rows"] * (256 + 4)


def test_measured_routes_are_refused_on_a_cpu(served):
    assert "needs a GPU" in record(served, "no-gpu")["error"]


def test_experts_take_the_same_branches_compiled(served):
    if SHARED is None:
        pytest.skip("upstream's other checkpoints are not on this machine")
    eager, compiled = record(served, "qwen3moe-exl3-mcg-3bpw"), record(served, "moe-compiled")
    assert eager["counts"] == compiled["counts"]
    assert any(len(parts) == 24 for parts in eager["config"]["linears"].values())


def test_guards_hold_in_vllms_environment(vllm_python):
    done = subprocess.run(
        [vllm_python, "-m", "pytest", "-p", "no:cacheprovider", "-q", str(Path(__file__).with_name("test_guards.py"))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout[-4000:]


@pytest.mark.slow
def test_two_ranks_score_as_one(vllm_python, tmp_path):
    if SHARED is None:
        pytest.skip("the checkpoint with heads of 128 is not on this machine")
    model = alone(SHARED / "qwen3/exl3-mul1-6bpw", tmp_path / "model")
    found = []
    for ranks in (1, 2):
        out = tmp_path / f"{ranks}.npy"
        several = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"} if ranks > 1 else {}
        run(vllm_python, "ranks_run.py", model, ranks, out, *IDS, **several)
        found.append(np.load(out))
    assert np.abs(found[0] - found[1]).max() < 1e-4
