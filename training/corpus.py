"""Build the bundled model's training tokens: fetch, clean, dedupe, exclude the evaluation suite, tokenize.

    PYTHONPATH=. python -m training.corpus --suite contexts/heldout-v1 --out .corpus

A document that shares more than `MAX_SHARED` distinct 12-word shingles with any context of the suite
(either split) is dropped whole; `excluded.json` lists every one. The result is one compressed uint16
token stream per family and split, the tokenizer, and `corpus.json` with counts and digests.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from exl3eval.records import digest_value, read_json, write_json
from exl3eval.suite.shingles import SHINGLE_WORDS, count_shared, shingle_hashes
from training.chat import BOS, EOS
from training.chats import generate_chats
from training.fetch import Document, Source, fetch_package, load_sources, read_documents, shuffle_key
from training.synthetic import generate
from training.tokenizer import save_tokenizer, train_tokenizer

SEED = 20_261
MAX_SHARED = 2
HELD_OUT_PERCENT = 3
HELD_OUT_BYTES = 150_000
TOKENIZER_BYTES = 1_400_000
CHAT_MEGABYTES = 4.0
SCRIPTS = {
    "zh": r"[㐀-鿿]",
    "ja": r"[぀-ヿ㐀-鿿]",
    "ru": r"[Ѐ-ӿ]",
    "ar": r"[؀-ۿ]",
    "hi": r"[ऀ-ॿ]",
}
_LICENCE = re.compile(r"licen[cs]e|copyright|redistribut", re.I)
_LEADING_COMMENT = re.compile(
    r"\A(?:(?:#!|<\?php)[^\n]*\n)?\s*(/\*.*?\*/|(?:(?://|#|--|%|;)[^\n]*\n)+|\.\. [^\n]*\n(?:  [^\n]*\n)*)", re.S
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ufffd]")


def clean(document: Document) -> Document | None:
    """Normalise white space and drop licence headers; None if too little or the wrong script is left."""
    text = document.text.replace("\r\n", "\n").expandtabs(4) if document.family != "code" else document.text
    text = _CONTROL.sub("", text.replace("\r", "\n"))
    while (header := _LEADING_COMMENT.match(text)) and _LICENCE.search(header[0]):
        text = text[header.end() :]
    text = re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", text)).strip()
    letters = sum(map(str.isalpha, text[:20_000]))
    script = SCRIPTS.get(document.family)
    native = len(re.findall(script, text[:20_000])) if script else letters
    longest = max(map(len, text.split("\n")))
    if len(text) < 120 or native < 0.35 * letters or (document.family == "code" and longest > 600):
        return None
    return replace(document, text=text)


def dedupe(document: Document, seen: set[bytes]) -> Document | None:
    """Drop every paragraph of at least 60 characters that an earlier document already had."""
    kept: list[str] = []
    for block in document.text.split("\n\n"):
        key = hashlib.blake2b(re.sub(r"\s+", " ", block).encode(), digest_size=8).digest()
        if len(block) < 60 or key not in seen:
            kept.append(block)
            seen.add(key)
    text = "\n\n".join(kept)
    return replace(document, text=text) if len(text) >= 120 else None


def gather(source: Source, root: Path, seen: set[bytes], exclusion: Exclusion) -> Iterator[Document]:
    """Yield cleaned, deduplicated documents of one source, none of the suite's, until its share is full."""
    budget = source.megabytes * 1e6
    for raw in read_documents(source, fetch_package(source, root)):
        cleaned = clean(raw)
        if cleaned is None or not exclusion.admits(cleaned):
            continue
        document = dedupe(cleaned, seen)
        if document is None:
            continue
        size = len(document.text.encode())
        if size > budget:
            document = replace(document, text=document.text.encode()[: int(budget)].decode("utf-8", "ignore"))
        yield document
        budget -= size
        if budget <= 0:
            return


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


class Exclusion:
    """The suite's shingles, and the documents refused so far with the number of shingles they share."""

    def __init__(self, suite: Path) -> None:
        rows = [
            json.loads(line) for file in sorted(suite.glob("texts-*.jsonl")) for line in file.open(encoding="utf-8")
        ]
        if not rows:
            raise SystemExit(f"error: {suite.name} has no texts-*.jsonl; build the suite first or give another --suite")
        texts = ["\n".join(_strings([row.get("text"), row.get("messages"), row.get("tools")])) for row in rows]
        self.contexts = len(rows)
        self.held = np.unique(np.concatenate([shingle_hashes(text) for text in texts]))
        self.refused: dict[str, int] = {}

    def admits(self, document: Document) -> bool:
        """Tell whether a whole document is foreign to the suite; remember it if not."""
        shared = count_shared(shingle_hashes(document.text), self.held)
        if shared > MAX_SHARED:
            self.refused[document.id] = shared
        return shared <= MAX_SHARED


def split_held_out(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """Hold out about 3 % of every family by document, up to a size; a chat follows the document it quotes."""
    train: list[Document] = []
    held_out: list[Document] = []
    sizes: Counter[str] = Counter()
    for document in documents:
        chosen = int(shuffle_key(document.id.partition("?chat=")[0])[:8], 16) % 100 < HELD_OUT_PERCENT
        if chosen and sizes[document.family] < HELD_OUT_BYTES:
            sizes[document.family] += len(document.text.encode())
            held_out.append(document)
        elif not chosen:
            train.append(document)
    return train, held_out


def tokenizer_sample(documents: list[Document]) -> Iterator[str]:
    """Yield an equal share of text from every family, so that no script is starved of merges."""
    sizes: Counter[str] = Counter()
    for document in random.Random(SEED).sample(documents, len(documents)):
        if sizes[document.family] < TOKENIZER_BYTES:
            text = document.text[:20_000]
            sizes[document.family] += len(text.encode())
            yield text


def encode(documents: list[Document], tokenizer: Tokenizer) -> NDArray[np.uint16]:
    """Concatenate BOS + text + EOS of every document; chats carry their own BOS."""
    bos, eos = (tokenizer.token_to_id(token) for token in (BOS, EOS))
    ids: list[NDArray[np.uint16]] = []
    for start in range(0, len(documents), 256):
        batch = [document.text.removeprefix(BOS) for document in documents[start : start + 256]]
        for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
            ids.append(np.array([bos, *encoding.ids, eos], dtype=np.uint16))
    return np.concatenate(ids)


def build(suite: Path, out: Path, *, scale: float) -> dict[str, Any]:
    """Run the whole build; `scale` shrinks every source's share alike (for a quick trial)."""
    exclusion = Exclusion(suite)
    seen: set[bytes] = set()
    sources = [replace(source, megabytes=source.megabytes * scale) for source in load_sources()]
    documents: list[Document] = []
    for source in sources:
        found = list(gather(source, out, seen, exclusion))
        documents += found
        size = sum(len(d.text.encode()) for d in found) / 1e6
        print(f"{source.family:12} {source.package:36} {len(found):6} documents {size:7.2f} MB", flush=True)
    made = [*generate_chats(documents, SEED, CHAT_MEGABYTES * scale), *generate(SEED, scale)]
    documents += [document for document in made if exclusion.admits(document)]
    print(f"refused {len(exclusion.refused)} documents that share text with {exclusion.contexts} contexts", flush=True)
    train, held_out = split_held_out(documents)
    tokenizer = train_tokenizer(tokenizer_sample(train))
    save_tokenizer(tokenizer, out / "tokens" / "tokenizer")
    families: dict[str, dict[str, Any]] = defaultdict(dict)
    for split, chosen in (("train", train), ("heldout", held_out)):
        for family in sorted({document.family for document in documents}):
            part = [document for document in chosen if document.family == family]
            if not part:
                raise SystemExit(f"error: family {family} has no {split} document; give it a larger share")
            raw = encode(part, tokenizer).tobytes()
            (out / "tokens" / f"{split}-{family}.u16.xz").write_bytes(lzma.compress(raw, preset=6))
            text_bytes = sum(len(document.text.encode()) for document in part)
            families[family][split] = {
                "documents": len(part),
                "bytes": text_bytes,
                "tokens": len(raw) // 2,
                "sha256": hashlib.sha256(raw).hexdigest(),
            }
    write_json(out / "tokens" / "excluded.json", exclusion.refused)
    record = {
        "schema": "exl3eval/training-corpus/1",
        "seed": SEED,
        "suite": {"contexts": exclusion.contexts, "digest": digest_value(read_json(suite / "manifest.json"))},
        "exclusion": {
            "shingle_words": SHINGLE_WORDS,
            "max_shared": MAX_SHARED,
            "refused_documents": len(exclusion.refused),
        },
        "families": families,
        "sources": [{"package": s.package, "family": s.family, "licence": s.licence} for s in sources],
        "digest": digest_value(families),
    }
    write_json(out / "tokens" / "corpus.json", record)
    return record


def main() -> None:
    """Parse the command line and build."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--suite", type=Path, required=True, help="folder with manifest.json and texts-*.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="folder for packages and tokens")
    parser.add_argument("--scale", type=float, default=1.0, help="share of every source to keep")
    arguments = parser.parse_args()
    record = build(arguments.suite, arguments.out, scale=arguments.scale)
    tokens = {split: sum(f[split]["tokens"] for f in record["families"].values()) for split in ("train", "heldout")}
    size = sum(file.stat().st_size for file in (arguments.out / "tokens").glob("*.xz")) / 1e6
    print(f"{tokens['train']:,} training and {tokens['heldout']:,} held-out tokens, {size:.1f} MB compressed")


if __name__ == "__main__":
    main()
