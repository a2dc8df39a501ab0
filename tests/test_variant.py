"""Variants: shipped ones are complete, files are strict, resolution leaves nothing open."""

from pathlib import Path

import pytest

from exl3eval.errors import UsageError
from exl3eval.variant import differing_fields, load_variant, parse_variant, resolve_variant, shipped_variants

GOOD = """
schema = "exl3eval/variant/1"
name = "mine"
doc = "Mine."
activations = "float32"
linear = "1-:reference"
embedding = "stored"
"""


def test_every_shipped_variant_resolves_on_a_cpu() -> None:
    shipped = shipped_variants()
    assert {"base", "int8-embed"} <= set(shipped)
    for name, variant in shipped.items():
        assert variant.name == name
        assert variant.doc.endswith(".")


def test_int8_embed_changes_the_embedding_alone() -> None:
    assert differing_fields(load_variant("base"), load_variant("int8-embed")) == ["embedding"]


def test_resolution_fills_and_keeps() -> None:
    resolved = resolve_variant(load_variant("base"), "cpu")
    assert (resolved.activations, resolved.linear) == ("float32", "1-:reference")
    assert resolved.is_resolved
    declared = parse_variant(GOOD.replace("float32", "bfloat16"), where="x")
    assert resolve_variant(declared, "cpu").activations == "bfloat16"
    with pytest.raises(UsageError, match="no routes for device type 'tpu'"):
        resolve_variant(load_variant("base"), "tpu")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('schema = "exl3eval/variant/1"', 'schema = "exl3eval/variant/9"', "schema is 'exl3eval/variant/9'"),
        ('schema = "exl3eval/variant/1"', "", "schema is None"),
        ('embedding = "stored"', 'embeding = "stored"', "unknown key `embeding`.*did you mean `embedding`"),
        ('embedding = "stored"', "", "key `embedding` is missing"),
        ('embedding = "stored"', 'embedding = "int4"', "`embedding` is 'int4'.*use one of: stored, int8"),
        ('activations = "float32"', 'activations = "float8"', "`activations` is 'float8'"),
        ('activations = "float32"', "activations = 32", "`activations` is 32, expected a non-empty string"),
        ('name = "mine"', 'name = ""', "`name` is ''"),
        ('doc = "Mine."', "doc = [", "is not TOML"),
        ('embedding = "stored"', 'embedding = "stored"\nlogits = "float8"', "`logits` is 'float8'"),
        ('embedding = "stored"', 'embedding = "stored"\nrequires = "a"', "`requires` is 'a', expected a list"),
    ],
)
def test_malformed_files_say_what_is_wrong(old: str, new: str, reason: str) -> None:
    with pytest.raises(UsageError, match=f"(?s){reason}"):
        parse_variant(GOOD.replace(old, new), where="mine.toml")


def test_a_dispatch_that_does_not_parse_is_refused_before_any_work() -> None:
    variant = parse_variant(GOOD.replace("1-:reference", "1-8:reference"), where="x")
    with pytest.raises(UsageError, match="rows from 9 on are not served"):
        resolve_variant(variant, "cpu")


def test_composition_joins_what_parts_change() -> None:
    both = load_variant("int8-embed+bf16-logits")
    assert both.name == "int8-embed+bf16-logits"
    assert differing_fields(load_variant("base"), both) == ["embedding", "logits"]
    staged = load_variant("int8-embed+fp16-staged")
    assert (staged.requires, staged.embedding) == (("fp16-staged",), "int8")
    with pytest.raises(UsageError, match="set `linear` differently"):
        load_variant("fp16-staged+broken-window")
    with pytest.raises(UsageError, match="unknown variant 'nonsense'"):
        load_variant("int8-embed+nonsense")
    with pytest.raises(UsageError, match=r"int8-embed\+int8-embed names a variant twice"):
        load_variant("int8-embed+int8-embed")


def test_names_are_suggested_and_files_are_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean `int8-embed`"):
        load_variant("int8embed")
    file = tmp_path / "mine.toml"
    file.write_text(GOOD)
    assert load_variant(str(file)).name == "mine"
    with pytest.raises(UsageError, match=r"cannot read variant file none\.toml"):
        load_variant(str(tmp_path / "none.toml"))
