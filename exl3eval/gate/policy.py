"""Policies: which differences are acceptable, declared in TOML before a run and named by digest in every verdict.

A margin is the largest of three declared parts: a fraction of the baseline's own figure, an absolute value, and a
multiple of the run's floor (the reference at its other precision). None of them reads the variant under test.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from exl3eval.errors import UsageError
from exl3eval.records import digest_value

SCHEMA = "exl3eval/policy/1"
ENDPOINTS = ("mean", "p99", "cvar1", "ear", "top1")
MODES = ("non-inferiority", "equivalence")
DEFAULT_POLICY = "default"

_Table = TypeVar("_Table")


@dataclass(frozen=True, slots=True, kw_only=True)
class MarginRule:
    """How a margin is made from figures that are not under test.

    Parameters
    ----------
    fraction : float
        Of the baseline arm's figure.
    absolute : float
        In the endpoint's unit: nats for `mean`, `p99` and `cvar1`, a share of 1 for `ear` and `top1`. Positive, so
        that a baseline that reads 0 still has a margin.
    floors : float
        Multiple of the floor arm's figure.
    """

    absolute: float
    fraction: float = 0.0
    floors: float = 0.0

    def __post_init__(self) -> None:
        _check_numbers(self)
        if not (self.absolute > 0.0 and self.fraction >= 0.0 and self.floors >= 0.0):
            raise UsageError(
                f"margin {asdict(self)} has a part out of range", hint="absolute > 0, fraction >= 0 and floors >= 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StrataRule(MarginRule):
    """The guard on single kinds of text: it can fail a change, never pass one.

    Parameters
    ----------
    min_clusters : int
        Strata of fewer documents are listed, not judged.
    """

    min_clusters: int = 5

    def __post_init__(self) -> None:
        MarginRule.__post_init__(self)
        if self.min_clusters < 2:
            raise UsageError(f"min_clusters = {self.min_clusters} in strata", hint="give 2 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A declared rule for verdicts.

    Parameters
    ----------
    name, doc : str
        As used on the command line, and what it is for. `doc` is no part of the digest.
    margins : mapping of endpoint to MarginRule
        The endpoints that must all pass: `mean`, `p99`, `cvar1`, `ear`, `top1`.
    strata : StrataRule or None
        The guard on kinds of text, None for no guard.
    mode : str
        `non-inferiority`: not worse than the baseline by the margin. `equivalence`: neither worse nor better by it.
    alpha : float
        One-sided error rate: of passing a difference at the margin, and of failing one.
    min_power : float
        Smallest power at the margin, for no true difference, at which PASS is given.
    min_contexts, min_clusters : int
        Below either the intervals are not trustworthy and nothing is decided.
    looks : tuple of int
        Numbers of contexts at which a growing run may be judged; empty for one look at all contexts.
    num_resamples, seed : int
        Of the bootstrap.
    """

    name: str
    doc: str
    margins: Mapping[str, MarginRule]
    strata: StrataRule | None = None
    mode: str = "non-inferiority"
    alpha: float = 0.05
    min_power: float = 0.8
    min_contexts: int = 32
    min_clusters: int = 20
    looks: tuple[int, ...] = ()
    num_resamples: int = 9_999
    seed: int = 1

    def __post_init__(self) -> None:
        _check_numbers(self)
        if not self.margins or set(self.margins) - set(ENDPOINTS):
            raise UsageError(
                f"policy `{self.name}` has margins for {sorted(self.margins) or 'nothing'}",
                hint=f"give at least one of: {', '.join(ENDPOINTS)}",
            )
        if self.mode not in MODES:
            raise UsageError(f"policy `{self.name}`: mode is {self.mode!r}", hint=f"use one of: {', '.join(MODES)}")
        if not (0.0 < self.alpha < 0.5 and 0.0 < self.min_power < 1.0):
            raise UsageError(
                f"policy `{self.name}`: alpha = {self.alpha}, min_power = {self.min_power}",
                hint="alpha lies in (0, 0.5) and min_power in (0, 1)",
            )
        if min(self.min_contexts, self.min_clusters) < 2 or self.num_resamples < 999 or self.seed < 0:
            raise UsageError(
                f"policy `{self.name}`: min_contexts = {self.min_contexts}, min_clusters = {self.min_clusters}, "
                f"num_resamples = {self.num_resamples}, seed = {self.seed}",
                hint="at least 2 contexts and clusters, 999 resamples and a seed of 0 or more",
            )
        if list(self.looks) != sorted(set(self.looks)) or (self.looks and self.looks[0] < self.min_contexts):
            raise UsageError(
                f"policy `{self.name}`: looks are {list(self.looks)}",
                hint=f"looks increase from at least min_contexts = {self.min_contexts}",
            )

    @property
    def digest(self) -> str:
        """Digest of everything that can change a verdict."""
        record = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "doc"}
        record["margins"] = {name: asdict(rule) for name, rule in self.margins.items()}
        record["strata"] = self.strata and asdict(self.strata)
        return digest_value(record)


def parse_policy(text: str, *, where: str) -> Policy:
    """Parse one policy from TOML.

    Raises
    ------
    UsageError
        On TOML errors, a foreign schema, unknown or missing keys, or values of the wrong type or range.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{where} is not TOML: {error}", hint="start from a shipped policy") from error
    if (schema := table.pop("schema", None)) != SCHEMA:
        raise UsageError(f"{where}: schema is {schema!r}, expected {SCHEMA!r}", hint="write the file for this version")
    margins = table.get("margins")
    if not isinstance(margins, dict) or not all(isinstance(rule, dict) for rule in margins.values()):
        raise UsageError(f"{where}: `margins` is not a table of tables", hint="write [margins.mean] and its keys")
    table["margins"] = {name: _build(MarginRule, rule, f"{where} [margins.{name}]") for name, rule in margins.items()}
    if "strata" in table:
        table["strata"] = _build(StrataRule, table["strata"], f"{where} [strata]")
    if isinstance(table.get("looks"), list):
        table["looks"] = tuple(table["looks"])
    return _build(Policy, table, where)


def shipped_policies() -> dict[str, Policy]:
    """Return the policies that come with the package, by name."""
    found = [file for file in resources.files("exl3eval.gate.policies").iterdir() if file.name.endswith(".toml")]
    policies = [parse_policy(file.read_text(encoding="utf-8"), where=file.name) for file in found]
    return {policy.name: policy for policy in sorted(policies, key=lambda policy: policy.name)}


def shipped_file(name: str) -> Path:
    """Return the file that a shipped policy is read from."""
    return Path(str(resources.files("exl3eval.gate.policies"))) / f"{name}.toml"


def load_policy(name: str) -> Policy:
    """Return a shipped policy by name, or read one from a `.toml` file.

    Raises
    ------
    UsageError
        If there is no such policy or file, or the file is malformed.
    """
    if name.endswith(".toml"):
        try:
            return parse_policy(Path(name).read_text(encoding="utf-8"), where=Path(name).name)
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read policy file {Path(name).name}", hint="check its path") from error
    shipped = shipped_policies()
    if name not in shipped:
        close = get_close_matches(name, shipped, n=1)
        raise UsageError(
            f"unknown policy {name!r}",
            hint=f"did you mean `{close[0]}`?" if close else f"known: {', '.join(shipped)}; or give a .toml file",
        )
    return shipped[name]


def _build(kind: type[_Table], table: Any, where: str) -> _Table:
    """Construct a dataclass from a TOML table, refusing unknown and missing keys."""
    if not isinstance(table, dict):
        raise UsageError(f"{where} is not a table", hint="start from a shipped policy")
    known = [item.name for item in fields(kind)]  # type: ignore[arg-type]
    if unknown := sorted(set(table) - set(known)):
        close = get_close_matches(unknown[0], known, n=1)
        raise UsageError(
            f"{where}: unknown key `{unknown[0]}`",
            hint=f"did you mean `{close[0]}`?" if close else f"known keys: {', '.join(known)}",
        )
    try:
        return kind(**table)
    except TypeError as error:
        raise UsageError(f"{where}: {error}", hint=f"known keys: {', '.join(known)}") from error
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}", hint=error.hint) from error


def _check_numbers(record: Any) -> None:
    """Refuse a TOML value of another type than the field declares; bool is no number."""
    for item in fields(record):
        value, kind = getattr(record, item.name), str(item.type)
        expected: tuple[type, ...] = {"float": (int, float), "int": (int,), "str": (str,)}.get(kind, (object,))
        if kind == "tuple[int, ...]":
            wrong = not isinstance(value, tuple) or any(type(entry) is not int for entry in value)
        else:
            wrong = isinstance(value, bool) or not isinstance(value, expected)
        if wrong or (isinstance(value, float) and value - value != 0.0):
            raise UsageError(f"`{item.name}` is {value!r}, expected {kind}", hint="correct the value")
