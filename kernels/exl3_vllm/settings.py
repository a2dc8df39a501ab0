"""The plugin's only reader of the environment.

`EXL3_VLLM_VARIANT` holds one JSON object; every key may be left out:

| key | values | default |
|---|---|---|
| `linear` | a dispatch `first-last:route,...`, `measured` for this GPU's table of crossovers, or `auto` | `auto` |
| `embedding` | `stored`, or `int8` for the per-row int8 overlay of the input embedding | `stored` |
| `tally` | `true` to count launches on the device, inside graphs too | `false` |
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from typing import Any

VARIABLE = "EXL3_VLLM_VARIANT"
AUTO, MEASURED = "auto", "measured"
EMBEDDINGS = ("stored", "int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedVariant:
    """What the served model runs.

    Parameters
    ----------
    linear : str
        Dispatch of the EXL3 linears, `measured` or `auto` (the reference on a CPU, `measured` on a GPU).
    embedding : str
        `stored` or `int8`.
    tally : bool
        Count launches on the device; costs one small kernel per launch.

    Raises
    ------
    ValueError
        On a value of the wrong type, an unknown word, or a dispatch that does not parse.
    """

    linear: str = AUTO
    embedding: str = "stored"
    tally: bool = False

    def __post_init__(self) -> None:
        from exl3_kernels.linear import parse_dispatch

        if not isinstance(self.linear, str):
            raise ValueError(f"{VARIABLE}: `linear` is {self.linear!r}, expected a string")
        if self.linear not in (AUTO, MEASURED):
            parse_dispatch(self.linear)
        if self.embedding not in EMBEDDINGS:
            raise ValueError(f"{VARIABLE}: `embedding` is {self.embedding!r}, expected one of {', '.join(EMBEDDINGS)}")
        if not isinstance(self.tally, bool):
            raise ValueError(f"{VARIABLE}: `tally` is {self.tally!r}, expected true or false")

    def as_json(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return asdict(self)


def parse_variant(text: str) -> ServedVariant:
    """Parse the content of the variable; empty means all defaults.

    Raises
    ------
    ValueError
        If it is not one JSON object of known keys, each at most once.
    """
    if not text:
        return ServedVariant()
    try:
        pairs = json.loads(text, object_pairs_hook=_distinct)
    except json.JSONDecodeError as error:
        raise ValueError(f"{VARIABLE} is not JSON: {error}") from error
    if not isinstance(pairs, dict):
        raise ValueError(f"{VARIABLE} is not a JSON object: {text}")
    known = [field.name for field in fields(ServedVariant)]
    if unknown := sorted(set(pairs) - set(known)):
        raise ValueError(f"{VARIABLE}: unknown key `{unknown[0]}`; known: {', '.join(known)}")
    return ServedVariant(**pairs)


def load_variant() -> ServedVariant:
    """Read the variable; errors as in `parse_variant`."""
    return parse_variant(os.environ.get(VARIABLE, ""))


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError(f"{VARIABLE} names a key twice")
    return dict(pairs)
