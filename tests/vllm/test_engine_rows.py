"""Driving and scoring without vLLM: a scheduler that obeys, several that do not, and rows in every order."""

import sys
import weakref
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from exl3_kernels.routes import Launch
from exl3eval.checkpoint.directory import open_checkpoint
from exl3eval.engine.head import Head
from exl3eval.engine.lanes import Lane
from exl3eval.engine.model import load_arm
from exl3eval.errors import CheckpointError, InvalidRunError
from exl3eval.request import reference_variant
from exl3eval.score.divergence import Divergences, measure_divergences
from exl3eval.vllm_engine import score
from exl3eval.vllm_engine.arguments import FORCED_IDS
from exl3eval.vllm_engine.drive import Engine, Rows
from exl3eval.vllm_engine.reference_head import load_reference_head
from exl3eval.vllm_engine.score import Scorer
from exl3eval.vllm_engine.store import ContextRows, Evidenced, read_rows, write_rows

TIED = Path(__file__).parents[1] / "data/qwen2-tied"
VOCAB, WIDTH, HIDDEN = 17, 20, 4
IDS_BT1 = torch.arange(5 * 13).reshape(5, 13) * 7 % VOCAB


class Scheduler:
    """A stand-in for vLLM: chunked prefill and greedy decode under the caps that are set before each step.

    Logits of a row depend on its request, position and id alone; `defect` names how it misbehaves.
    """

    def __init__(self, *, all_prompt_rows, defect=""):
        self.scheduler_config = SimpleNamespace(long_prefill_token_threshold=0)
        self.max_num_scheduled_tokens = 0
        self.all_prompt_rows, self.defect = all_prompt_rows, defect
        self.running, self.calls = [], []

    def add_request(self, name, prompt, parameters):
        self.running.append(
            SimpleNamespace(name=name, ids=list(prompt["prompt_token_ids"]), done=0, out=[], p=parameters)
        )

    def step(self):
        budget, rows, prompts = self.max_num_scheduled_tokens, [], []
        for request in self.running:
            width = min(self.scheduler_config.long_prefill_token_threshold, len(request.ids) - request.done, budget)
            budget -= width
            logits = torch.stack([self.logits(request, place) for place in range(request.done, request.done + width)])
            last = request.done + width == len(request.ids)
            if request.p.prompt_logprobs is not None:
                prompts.append(logits if self.all_prompt_rows or not last else logits[:-1])
            request.done += width
            rows.append(logits[-1])
            if last:
                forced = (request.p.extra_args or {}).get(FORCED_IDS)
                token = forced[len(request.out)] if forced else int(logits[-1].argmax())
                if self.defect == "token":
                    token = (token + 1) % VOCAB
                request.out.append(token)
                request.ids.append(token)
        if self.defect == "rows":
            rows.append(rows[-1])
        self.calls = [torch.stack(rows), *(prompt for prompt in prompts if len(prompt))]
        finished = [request for request in self.running if len(request.out) == request.p.max_tokens]
        self.running = [request for request in self.running if request not in finished]
        return [
            SimpleNamespace(
                request_id=f"{request.name}-8f3a", finished=True, outputs=[SimpleNamespace(token_ids=request.out)]
            )
            for request in reversed(finished)
        ]

    def logits(self, request, place):
        scale = 3.0 if self.defect == "decode" and len(request.out) else 1.0
        seed = request.ids[place] * 100 + place
        return scale * torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))


def build(monkeypatch, **options):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=lambda **given: SimpleNamespace(**given)))
    scheduler = Scheduler(**{"all_prompt_rows": False} | options)
    engine = SimpleNamespace(
        engine_core=SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler)),
        add_request=scheduler.add_request,
        step=scheduler.step,
    )

    def collective_rpc(method):
        return [[(logits[:, :HIDDEN], logits) for logits in scheduler.calls] if method == "exl3eval_take" else None]

    return Engine(SimpleNamespace(llm_engine=engine, collective_rpc=collective_rpc)), scheduler


def expected(scheduler, batch, position):
    request = SimpleNamespace(ids=IDS_BT1[batch].tolist(), out=[])
    return scheduler.logits(request, position)


@pytest.mark.parametrize("all_prompt_rows", [False, True], ids=["V1", "V2"])
@pytest.mark.parametrize("lane", [Lane(kind="prefill"), Lane(kind="chunked", rows=5), Lane(kind="prefill", scored=3)])
def test_prompt_rows_are_placed_whatever_the_runner(monkeypatch, lane, all_prompt_rows):
    engine, scheduler = build(monkeypatch, all_prompt_rows=all_prompt_rows)
    rows = list(engine.run_lane(IDS_BT1[:1], lane))
    positions = torch.cat([each.position_R for each in rows])
    assert positions.tolist() == list(range(lane.first_scored(12), 12))
    emitted = torch.cat([each.logits_RV for each in rows])
    assert torch.equal(emitted, torch.stack([expected(scheduler, 0, int(position)) for position in positions]))


@pytest.mark.parametrize("style", ["one-token", "forced"])
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_decode_lanes_move_in_lock_step(monkeypatch, batch, style):
    engine, scheduler = build(monkeypatch)
    rows = list(engine.run_lane(IDS_BT1[:batch], Lane(kind="decode", rows=batch, scored=4), style=style))
    assert [each.position_R.tolist() for each in rows] == [[position] * batch for position in range(8, 12)]
    for each in rows:
        for index in range(batch):
            assert torch.equal(each.logits_RV[index], expected(scheduler, index, int(each.position_R[0])))


@pytest.mark.parametrize(
    ("defect", "lane", "style", "message"),
    [
        ("rows", Lane(kind="decode", rows=2, scored=4), "one-token", r"decode step of 2 requests emitted rows \[3\]"),
        ("rows", Lane(kind="prefill"), "one-token", "prefill step of 12 ids emitted rows"),
        ("token", Lane(kind="decode", rows=2, scored=4), "one-token", "not the most likely"),
        ("token", Lane(kind="decode", rows=2, scored=4), "forced", "other ids than the held-out ones"),
    ],
)
def test_an_engine_that_does_otherwise_is_invalid(monkeypatch, defect, lane, style, message):
    engine, _ = build(monkeypatch, defect=defect)
    with pytest.raises(InvalidRunError, match=message):
        list(engine.run_lane(IDS_BT1[: lane.batch], lane, style=style))


def test_an_engine_must_score_what_it_generates(monkeypatch):
    engine, _ = build(monkeypatch)
    engine.check_self([1, 2, 3], 4)
    wrong, scheduler = build(monkeypatch)
    plain = scheduler.logits
    monkeypatch.setattr(scheduler, "logits", lambda request, place: plain(request, place) * (1 if request.out else -1))
    with pytest.raises(InvalidRunError, match="below its own best"):
        wrong.check_self([1, 2, 3], 4)


def whole_numbers(shape, generator):
    """Products of these are exact in FP32, in whatever order a head adds them up."""
    return torch.randint(-2, 3, shape, generator=generator).float()


def scorer(generator, **options):
    module = nn.Linear(HIDDEN, WIDTH, bias=False)
    module.weight.data = whole_numbers((WIDTH, HIDDEN), generator)
    return Scorer(head=Head(module=module.requires_grad_(False), vocab_size=VOCAB), vocab_size=VOCAB, **options)


def emitted_rows(logits_BSW, hidden_BSH, order):
    for places in order:
        request = torch.tensor([place[0] for place in places])
        position = torch.tensor([place[1] for place in places])
        yield Rows(
            request_R=request,
            position_R=position + 8,
            hidden_RH=hidden_BSH[request, position],
            logits_RV=logits_BSW[request, position],
        )


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(3)
    hidden, reference = whole_numbers((2, 2, 6, HIDDEN), generator)
    return SimpleNamespace(
        scorer=scorer(generator),
        hidden=hidden,
        reference=reference,
        logits=torch.randn(2, 6, WIDTH, generator=generator),
        targets=torch.randint(0, VOCAB, (2, 6), generator=generator),
    )


IN_LOCK_STEP = [[(0, place), (1, place)] for place in range(6)]
ONE_BY_ONE = [[(request, place) for place in range(6)] for request in range(2)]


@pytest.mark.parametrize("order", [IN_LOCK_STEP, ONE_BY_ONE], ids=["lock-step", "one by one"])
@pytest.mark.parametrize("block", [1, 5 * WIDTH, 1 << 25])
def test_rows_are_divergences_of_the_plain_computation(monkeypatch, batch, order, block):
    monkeypatch.setattr(score, "BLOCK_LOGITS", block)
    rows, hidden = batch.scorer.score_batch(
        emitted_rows(batch.logits, batch.hidden, order), batch.targets, batch.reference
    )
    for index in range(2):
        reference = batch.scorer.head.logits(batch.reference[index])
        found = measure_divergences(
            reference, {"arm": batch.logits[index, :, :VOCAB].contiguous()}, batch.targets[index]
        )["arm"]
        for field in fields(Divergences):
            assert torch.equal(getattr(rows[index].divergences, field.name), getattr(found, field.name))
        whole = batch.logits[index].double().log_softmax(dim=1)
        cut = 1 - whole[:, :VOCAB].exp().sum(dim=1).max()
        assert rows[index].evidence.cut_mass >= float(cut) - 1e-12
        top = batch.logits[index, :, :VOCAB].double().log_softmax(dim=1).topk(5)
        assert torch.equal(rows[index].candidate_ids, top.indices.int())
        # FP64 sums in two orders: a few ulps of a log-probability below 32.
        assert float((rows[index].candidate_log_probs - top.values).abs().max()) < 1e-13
    assert torch.equal(hidden, batch.hidden)


def test_a_reference_is_scored_against_its_own_replay(batch):
    logits = batch.scorer.head.all_logits(batch.hidden.reshape(-1, HIDDEN)).reshape(2, 6, WIDTH)
    rows, _ = batch.scorer.score_batch(emitted_rows(logits, batch.hidden, ONE_BY_ONE), batch.targets, None)
    assert max(float(each.divergences.kl.max()) for each in rows) < 1e-12


@pytest.mark.parametrize("order", [IN_LOCK_STEP[:-1], [*IN_LOCK_STEP, IN_LOCK_STEP[2]]], ids=["missing", "doubled"])
def test_every_position_is_scored_exactly_once(batch, order):
    with pytest.raises(InvalidRunError, match="rows were emitted for 2 x 6 positions"):
        batch.scorer.score_batch(emitted_rows(batch.logits, batch.hidden, order), batch.targets, batch.reference)


def test_logits_live_for_one_block_however_many_rows_come(monkeypatch, batch):
    """Memory is flat in positions: of all rows emitted, only one block's logits are alive at a time."""
    monkeypatch.setattr(score, "BLOCK_LOGITS", 4 * WIDTH)
    alive, most = weakref.WeakSet(), 0

    def emit():
        nonlocal most
        for rows in emitted_rows(batch.logits, batch.hidden, IN_LOCK_STEP):
            logits = rows.logits_RV.clone()
            alive.add(logits)
            most = max(most, len(alive))
            yield Rows(request_R=rows.request_R, position_R=rows.position_R, hidden_RH=rows.hidden_RH, logits_RV=logits)
            del rows, logits

    batch.scorer.score_batch(emit(), batch.targets, batch.reference)
    assert most <= 3 < len(IN_LOCK_STEP)


def test_states_that_are_not_finite_are_invalid(batch):
    batch.hidden[1, 2, 0] = float("nan")
    with pytest.raises(InvalidRunError, match="not finite"):
        batch.scorer.score_batch(emitted_rows(batch.logits, batch.hidden, ONE_BY_ONE), batch.targets, batch.reference)


def test_controls_round_logits_or_take_the_references_head(batch):
    arguments = (batch.targets, batch.reference)
    rounding = Scorer(head=batch.scorer.head, vocab_size=VOCAB, round_logits=True)
    shared = Scorer(head=batch.scorer.head, vocab_size=VOCAB, own_head=False)
    rounded, _ = rounding.score_batch(emitted_rows(batch.logits, batch.hidden, ONE_BY_ONE), *arguments)
    body, _ = shared.score_batch(emitted_rows(batch.logits, batch.reference, ONE_BY_ONE), *arguments)
    assert [rows.evidence.grid for rows in rounded] == ["bfloat16", "bfloat16"]
    assert float(torch.cat([rows.divergences.kl for rows in body]).abs().max()) == 0.0


def test_a_file_that_is_not_what_it_says_is_not_read(tmp_path, batch):
    rows, _ = batch.scorer.score_batch(
        emitted_rows(batch.logits, batch.hidden, ONE_BY_ONE), batch.targets, batch.reference
    )
    launch = Launch("reference", 2, 128, 128, 4, "mcg")
    evidence = Evidenced(launches={launch: 3}, head_rows={2: 6}, graph_replays=6, grid=None, cut_mass=0.25)
    whole = ContextRows(
        divergences=rows[0].divergences,
        candidate_ids=rows[0].candidate_ids,
        candidate_log_probs=rows[0].candidate_log_probs,
        evidence=evidence,
    )
    path = tmp_path / "c.safetensors"
    write_rows(path, whole)
    found = read_rows(path)
    assert found is not None and found.evidence == evidence
    assert torch.equal(found.divergences.kl, whole.divergences.kl)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    assert read_rows(path) is None
    path.write_bytes(content[:40])
    assert read_rows(path) is None
    assert read_rows(tmp_path / "absent") is None


@pytest.mark.parametrize("name", ["bf16", "exl3-mcg-5bpw"])
def test_the_head_alone_is_the_loaded_model_s(name):
    checkpoint = open_checkpoint(TIED / name)
    variant = reference_variant("reference", "float32")
    arm = load_arm(checkpoint, variant, vocab_size=1000, device=torch.device("cpu"))
    head = load_reference_head(checkpoint, vocab_size=1000, device=torch.device("cpu"))
    hidden = arm.hidden_states(torch.arange(3, 20))
    assert torch.equal(head.all_logits(hidden), arm.head.all_logits(hidden))
    with pytest.raises(CheckpointError, match="1024 columns, the tokenizer 2000 ids"):
        load_reference_head(checkpoint, vocab_size=2000, device=torch.device("cpu"))
