"""Other tools' numbers: read exactly, bounded honestly, never gated."""

import json
import struct
from datetime import UTC, datetime

import numpy as np
import pytest

from exl3eval.errors import InvalidRunError, UsageError
from exl3eval.gate.evidence import read_run
from exl3eval.gate.foreign import LABEL, RowKeys, import_llama, import_rows, write_foreign
from exl3eval.gate.llama_kld import read_llama_kld, summarise_base, summarise_pair
from exl3eval.records import canonical_json

NOW = datetime(2026, 1, 1, tzinfo=UTC)
N_CTX, N_CHUNK = 12, 3


def distributions(vocab: int, *, spread: float = 4.0, seed: int = 0) -> np.ndarray:
    """Log-probabilities [N_CHUNK, R, V]."""
    rows = N_CTX - 1 - N_CTX // 2
    logits = np.random.default_rng(seed).normal(0.0, spread, (N_CHUNK, rows, vocab))
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def write_kld(path, log_p: np.ndarray, *, tokens: np.ndarray | None = None):
    """Write a base file from the format's public description: 16 nats below the largest is code 0."""
    vocab = log_p.shape[-1]
    if tokens is None:
        tokens = np.arange(N_CHUNK * N_CTX).reshape(N_CHUNK, N_CTX) % vocab
    content = b"_logits_" + struct.pack("<3i", N_CTX, vocab, N_CHUNK) + tokens.astype("<i4").tobytes()
    for row in log_p.reshape(-1, vocab).astype(np.float32):
        floor = max(row.min(), row.max() - np.float32(16.0))
        step = (row.max() - floor) / np.float32(65535.0)
        codes = np.where(row > floor, np.rint((row - floor) / step), 0).astype("<u2")
        content += np.array([step, floor], "<f4").tobytes() + codes.tobytes() + b"\0\0" * (vocab % 2)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("vocab", [50, 51])
def test_log_probabilities_are_read_to_half_a_step(tmp_path, vocab):
    log_p = distributions(vocab, spread=6.0)
    found = read_llama_kld(write_kld(tmp_path / "a.kld", log_p))
    for index in range(N_CHUNK):
        read, stored = found.chunk(index)
        assert np.abs(read - log_p[index])[stored].max() < 16.0 / 65535.0 / 2.0 * 1.01
        assert (log_p[index][~stored] <= read[~stored] + 1e-6).all()
    assert found.targets.shape == (N_CHUNK, N_CTX - 1 - N_CTX // 2)
    assert found.targets[0, 0] == found.tokens[0, N_CTX // 2 + 1]


def test_the_stored_distribution_is_summarised_without_renormalising(tmp_path):
    log_p = distributions(400, spread=7.0)
    rows = summarise_base(read_llama_kld(write_kld(tmp_path / "a.kld", log_p)))
    entropy = -(np.exp(log_p) * log_p).sum(axis=-1).mean(axis=-1)
    assert [row["value"] for row in rows] == pytest.approx(entropy, abs=2e-3)
    assert all(abs(row["missing_mass"]) < 1e-3 for row in rows)
    assert sum(row["targets_below_floor"] for row in rows) > 0


def test_a_file_against_itself_is_exactly_zero_with_tail_below_the_floor(tmp_path):
    base = read_llama_kld(write_kld(tmp_path / "a.kld", distributions(400, spread=8.0)))
    assert not base.chunk(0)[1].all()
    assert [row["value"] for row in summarise_pair(base, base)] == [0.0] * N_CHUNK


@pytest.mark.parametrize("spread", [1.0, 4.0, 9.0])
def test_the_bound_lies_below_the_divergence_and_near_it(tmp_path, spread):
    log_p, noise = distributions(300, spread=spread), distributions(300, spread=0.5, seed=1)
    log_q = log_p + noise
    log_q -= np.log(np.exp(log_q).sum(axis=-1, keepdims=True))
    exact = (np.exp(log_p) * (log_p - log_q)).sum(axis=-1).mean(axis=-1)
    files = [read_llama_kld(write_kld(tmp_path / name, x)) for name, x in (("p", log_p), ("q", log_q))]
    bound = np.array([row["value"] for row in summarise_pair(*files)])
    rounding = 16.0 / 65535.0 * np.abs(np.exp(log_q) - np.exp(log_p)).sum(axis=-1).mean(axis=-1)
    assert (bound <= exact + rounding).all()
    assert bound == pytest.approx(exact, rel=2e-2)


def test_damaged_and_unlike_files_are_refused(tmp_path):
    log_p = distributions(50)
    path = write_kld(tmp_path / "a.kld", log_p)
    content = path.read_bytes()
    for name, damaged, message in (
        ("cut", content[:-2], "its header says"),
        ("long", content + b"\0\0", "its header says"),
        ("magic", b"_logitz_" + content[8:], "starts with"),
        ("short", content[:10], "starts with"),
        ("header", content[:8] + struct.pack("<3i", 2, 50, 3) + content[20:], "n_ctx = 2"),
        ("tokens", content[:20] + struct.pack("<i", 99) + content[24:], "token ids outside"),
    ):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(UsageError, match=message):
            read_llama_kld(tmp_path / name)
    base = read_llama_kld(path)
    other = write_kld(tmp_path / "b.kld", log_p, tokens=np.zeros((N_CHUNK, N_CTX), int))
    with pytest.raises(UsageError, match="differ in tokens_digest"):
        summarise_pair(base, read_llama_kld(other))
    with pytest.raises(UsageError, match="differ in n_vocab: 52 against 50"):
        summarise_pair(base, read_llama_kld(write_kld(tmp_path / "c.kld", distributions(52))))
    with pytest.raises(UsageError, match=r"cannot read absent"):
        read_llama_kld(tmp_path / "absent")


def test_the_record_is_labelled_strict_and_refused_by_the_gate(tmp_path):
    base = write_kld(tmp_path / "a.kld", distributions(50))
    record = import_llama(base, base, now=NOW)
    assert record["label"] == LABEL
    assert record["measure"] == "kl_lower_bound"
    assert record["mean"]["mean"] == 0.0
    assert str(tmp_path) not in canonical_json(record)
    assert import_llama(base, None, now=NOW)["measure"] == "entropy"
    write_foreign(tmp_path / "out", record)
    with pytest.raises(InvalidRunError, match="holds foreign evidence"):
        read_run(tmp_path / "out")
    with pytest.raises(UsageError, match="is not empty"):
        write_foreign(tmp_path / "out", record)


ROWS = [{"name": f"c{i}", "doc": f"d{i // 2}", "kld": 0.001 * (i + 1)} for i in range(10)]
KEYS = RowKeys(value="kld", context="name", cluster="doc")


@pytest.mark.parametrize("lines", [False, True])
def test_rows_are_imported_with_their_documents(tmp_path, lines):
    path = tmp_path / "rows"
    path.write_text("\n".join(map(json.dumps, ROWS)) if lines else json.dumps(ROWS))
    record = import_rows(path, KEYS, now=NOW)
    assert record["mean"]["mean"] == pytest.approx(0.0055)
    assert record["mean"]["num_clusters"] == 5
    unknown = import_rows(path, RowKeys(value="kld", context="name"), now=NOW)
    assert unknown["mean"]["num_clusters"] == 10
    assert any("documents are unknown" in limit for limit in unknown["limits"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no row"),
        ("[1]", "row 1 is not an object"),
        ('[{"name": "a", "doc": "b"}]', "has no 'kld'"),
        ('[{"name": "a", "doc": "b", "kld": NaN}]', "not strict JSON"),
        ('[{"name": "a", "doc": "b", "kld": "1"}]', "not a finite number"),
        ('[{"name": "a", "doc": "b", "kld": true}]', "not a finite number"),
        (json.dumps([ROWS[0], ROWS[0]]), "context 'c0' appears twice"),
        ("{", "not strict JSON"),
    ],
)
def test_bad_rows_are_refused_by_place(tmp_path, text, message):
    (tmp_path / "rows").write_text(text)
    with pytest.raises(UsageError, match=message):
        import_rows(tmp_path / "rows", KEYS, now=NOW)
