"""Variants: what a candidate arm runs, declared in TOML and resolved for a device.

A variant names everything that may change a number: activation dtype, which route serves which row
count, and overlays. Both the declaration and its resolution go into the receipt.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import MISSING, dataclass, fields, replace
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any

from exl3eval.errors import UsageError
from exl3eval.vllm_engine.stack import VllmStack, parse_stack

SCHEMA = "exl3eval/variant/1"
AUTO = "auto"
ACTIVATIONS = ("float32", "bfloat16", "float16")
EMBEDDINGS = ("stored", "int8")
MEASURED = "measured"
LOGITS = ("float32", "bfloat16")
HEADS = ("own", "reference")
GRAPHS = ("off", "decode")
NO_QUANTIZING = "none"
STACK = "vllm"
LISTS = ("requires", "forbids", "lanes")
_DEVICE_DEFAULTS = {
    "cpu": {"activations": "float32", "linear": "1-:reference"},
    "cuda": {"activations": "float32", "linear": MEASURED},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One declared variant.

    Parameters
    ----------
    name : str
        As used on the command line.
    doc : str
        What it changes, one sentence.
    activations : str
        Dtype of the residual stream: `float32`, `bfloat16`, `float16`, or `auto` for the device's default.
    linear : str
        Dispatch of the EXL3 linears, `first-last:route,...` over row counts; `measured` for this GPU's table of
        crossovers; or `auto`.
    embedding : str
        `stored`, or `int8` for the per-row int8 overlay of the input embedding.
    head : str
        `own`, or `reference` to score the arm's hidden states through the reference's head (isolates the body).
    graphs : str
        `off`, or `decode` to replay decode steps from a CUDA graph.
    quantize : str
        `none`, or `<bits>-<codebook>` to run the 16-bit source quantized at load, without calibration, in place of the
        checkpoint.
    logits : str
        `float32`, or `bfloat16` to round them: a known-bad control.
    vllm : VllmStack or None
        Someone else's vLLM stack in place of these kernels.
    requires : tuple of str
        Routes that must have launched, or the arm is INVALID; a declared route that never ran proves nothing.
    forbids : tuple of str
        Routes that must not have launched.
    lanes : tuple of str
        Kinds of lane in which the variant means something; empty for all.

    Raises
    ------
    UsageError
        If a field holds an unknown value.
    """

    name: str
    doc: str
    activations: str
    linear: str
    embedding: str
    head: str = "own"
    graphs: str = "off"
    quantize: str = "none"
    logits: str = "float32"
    vllm: VllmStack | None = None
    requires: tuple[str, ...] = ()
    forbids: tuple[str, ...] = ()
    lanes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == STACK:
                continue
            if field.name in LISTS:
                if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
                    raise UsageError(
                        f"variant {self.name!r}: `{field.name}` is {value!r}, expected a list of strings",
                        hint="see `exl3eval variants` for complete examples",
                    )
                object.__setattr__(self, field.name, tuple(value))
            elif not isinstance(value, str) or not value:
                raise UsageError(
                    f"variant {self.name!r}: `{field.name}` is {value!r}, expected a non-empty string",
                    hint="see `exl3eval variants` for complete examples",
                )
        for field_name, known in (
            ("activations", (AUTO, *ACTIVATIONS)),
            ("embedding", EMBEDDINGS),
            ("head", HEADS),
            ("graphs", GRAPHS),
            ("logits", LOGITS),
        ):
            value = getattr(self, field_name)
            if value not in known:
                raise UsageError(
                    f"variant {self.name!r}: `{field_name}` is {value!r}", hint=f"use one of: {', '.join(known)}"
                )

        if self.quantize != NO_QUANTIZING and re.fullmatch(r"[1-8]-(mcg|mul1|3inst)", self.quantize) is None:
            raise UsageError(
                f"variant {self.name!r}: `quantize` is {self.quantize!r}", hint='use "none", or for instance "6-mcg"'
            )

    @property
    def identity(self) -> dict[str, Any]:
        """Everything declared, without a path."""
        plain = {field.name: getattr(self, field.name) for field in fields(self) if field.name != STACK}
        return plain | {STACK: None if self.vllm is None else self.vllm.identity}

    @property
    def is_resolved(self) -> bool:
        """Whether nothing is left to the device."""
        return AUTO not in (self.activations, self.linear)


def parse_variant(text: str, *, where: str) -> Variant:
    """Parse one variant from TOML.

    Raises
    ------
    UsageError
        On TOML errors, a foreign schema, unknown or missing keys, or unknown values.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{where} is not TOML: {error}", hint="see `exl3eval variants` for examples") from error
    schema = table.pop("schema", None)
    if schema != SCHEMA:
        raise UsageError(f"{where}: schema is {schema!r}, expected {SCHEMA!r}", hint="write the file for this version")
    stack = table.pop(STACK, None)
    known = [field.name for field in fields(Variant)]
    if unknown := sorted(set(table) - set(known)):
        close = get_close_matches(unknown[0], known, n=1)
        raise UsageError(
            f"{where}: unknown key `{unknown[0]}`",
            hint=f"did you mean `{close[0]}`?" if close else f"known keys: {', '.join(known)}",
        )
    needed = [field.name for field in fields(Variant) if field.default is MISSING]
    if missing := [name for name in needed if name not in table]:
        raise UsageError(f"{where}: key `{missing[0]}` is missing", hint=f"required keys: {', '.join(needed)}")
    return Variant(**table, vllm=None if stack is None else parse_stack(stack, where=where))


def shipped_variants() -> dict[str, Variant]:
    """Return the variants that come with the package, by name, in name order."""
    files = (file for file in resources.files("exl3eval.variants").iterdir() if file.name.endswith(".toml"))
    variants = [parse_variant(file.read_text(encoding="utf-8"), where=file.name) for file in files]
    return {variant.name: variant for variant in sorted(variants, key=lambda variant: variant.name)}


def load_variant(name: str) -> Variant:
    """Return a shipped variant by name, several composed with `+`, or one read from a `.toml` file.

    Raises
    ------
    UsageError
        If there is no such variant or file, the file is malformed, or two parts set one field differently.
    """
    if "+" in name and not name.endswith(".toml"):
        return _compose([load_variant(part) for part in name.split("+")])
    if name.endswith(".toml"):
        try:
            return parse_variant(Path(name).read_text(encoding="utf-8"), where=Path(name).name)
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read variant file {Path(name).name}", hint="check its path") from error
    shipped = shipped_variants()
    if name not in shipped:
        close = get_close_matches(name, shipped, n=1)
        raise UsageError(
            f"unknown variant {name!r}",
            hint=f"did you mean `{close[0]}`?" if close else f"known: {', '.join(shipped)}; or give a .toml file",
        )
    return shipped[name]


def _compose(parts: list[Variant]) -> Variant:
    """Apply what each part changes of `base`; lists are joined."""
    base = load_variant("base")
    changes: dict[str, Any] = {}
    if len({part.name for part in parts}) != len(parts):
        raise UsageError(f"{'+'.join(part.name for part in parts)} names a variant twice", hint="name each part once")
    for part in parts:
        for field_name in differing_fields(base, part):
            value = getattr(part, field_name)
            if field_name in LISTS:
                value = tuple(dict.fromkeys((*changes.get(field_name, ()), *value)))
            elif changes.get(field_name, value) != value:
                raise UsageError(
                    f"variants {' and '.join(p.name for p in parts)} set `{field_name}` differently",
                    hint="compose variants that change different things",
                )
            changes[field_name] = value
    changes |= {"name": "+".join(part.name for part in parts), "doc": " ".join(part.doc for part in parts)}
    return replace(base, **changes)


def resolve_variant(variant: Variant, device_type: str, *, measured: str = "") -> Variant:
    """Fill what the variant leaves to the device, and check the dispatch.

    Parameters
    ----------
    variant : Variant
        As declared.
    device_type : str
        `cpu` or `cuda`.
    measured : str
        What `measured` means on the GPU, see `exl3_kernels.dispatch.measured_on`; the resolution names it.

    Raises
    ------
    UsageError
        If the device type has no defaults, or the dispatch does not parse.
    """
    if device_type not in _DEVICE_DEFAULTS:
        raise UsageError(f"no routes for device type {device_type!r}", hint="use --device cpu or cuda")
    defaults = _DEVICE_DEFAULTS[device_type]
    filled: dict[str, Any] = {name: value for name, value in defaults.items() if getattr(variant, name) == AUTO}
    resolved = replace(variant, **filled)
    if resolved.linear == MEASURED:
        if device_type != "cuda":
            raise UsageError(
                f"variant {variant.name!r}: `linear` is {MEASURED!r}, which needs a GPU", hint="use --device cuda"
            )
        return replace(resolved, linear=f"{MEASURED}:{measured}")
    from exl3_kernels.linear import parse_dispatch

    try:
        parse_dispatch(resolved.linear)
    except ValueError as error:
        raise UsageError(f"variant {variant.name!r}: {error}", hint="see `exl3eval variants`") from error
    return resolved


def differing_fields(left: Variant, right: Variant) -> list[str]:
    """Name the fields, other than name and doc, in which two variants differ."""
    a, b = left.identity, right.identity
    return [name for name in a if name not in ("name", "doc") and a[name] != b[name]]
