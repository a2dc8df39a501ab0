"""What to build a suite from: named packages, the documents to take, and what each stratum must hold."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from exl3eval.errors import SuiteError
from exl3eval.suite.context import StratumFloor
from exl3eval.suite.fetch import CLIENTS, Source
from exl3eval.suite.readers import GENERATORS, READERS

RECIPE_SCHEMA = "exl3eval.suite-recipe/1"
_HINT = "compare it with the shipped recipe"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """Take `take` documents of one source into one stratum."""

    stratum: str
    language: str
    source: str
    reader: str
    paths: tuple[str, ...]
    """Glob patterns inside the package; for a generator, the kinds to generate."""
    take: int
    licence: str
    """The text's licence where it differs from the package's, else empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What to build."""

    name: str
    seed: int
    analysis: int
    floors: Mapping[str, StratumFloor]
    window_chars: Mapping[str, int]
    """Characters kept per stratum: what 2,048 tokens need with a large vocabulary, and a margin."""
    calibration: Mapping[str, str]
    """sha256 of each file that holds the calibration texts."""
    sources: Mapping[str, Source]
    picks: tuple[Pick, ...]


def read_recipe(path: Path) -> Recipe:
    """Read a recipe.

    Raises
    ------
    SuiteError
        If the file is missing, is not TOML or not a recipe; the message names the field.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        if table.get("schema") != RECIPE_SCHEMA:
            raise SuiteError(f"{path.name} has schema {table.get('schema')!r}, expected {RECIPE_SCHEMA!r}", hint=_HINT)
        strata = table["strata"]
        window_chars = {name: stratum.pop("window_chars") for name, stratum in strata.items()}
        source_defaults = {"package": "", "version": "", "sha256": "", "notice": ""}
        sources = [Source(**(source_defaults | source)) for source in table["sources"]]
        picks = [Pick(**({"licence": ""} | pick | {"paths": tuple(pick["paths"])})) for pick in table["picks"]]
        recipe = Recipe(
            name=table["name"],
            seed=table["seed"],
            analysis=table["analysis"],
            floors={name: StratumFloor(**stratum) for name, stratum in strata.items()},
            window_chars=window_chars,
            calibration=table["calibration"],
            sources={source.id: source for source in sources},
            picks=tuple(picks),
        )
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise SuiteError(f"{path.name} is not a recipe: {error}", hint=_HINT) from error
    for pick in recipe.picks:
        known = pick.source in recipe.sources and pick.stratum in recipe.floors
        if not known or pick.reader not in READERS.keys() | GENERATORS.keys():
            raise SuiteError(f"{path.name}: {pick} names an unknown source, stratum or reader", hint=_HINT)
    for source in recipe.sources.values():
        if source.client not in CLIENTS:
            raise SuiteError(f"{path.name}: unknown client {source.client!r}", hint=f"use one of {', '.join(CLIENTS)}")
    return recipe
