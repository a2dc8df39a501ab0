"""The model that `exl3eval` uses when none is given: a small Llama in BF16 and in EXL3."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from exl3eval.errors import UsageError


def bundled_model(form: str) -> Path:
    """Return the folder of the bundled model's `bf16` or `exl3` form.

    Raises
    ------
    UsageError
        If this installation does not carry it.
    """
    directory = Path(str(resources.files("exl3eval.bundled"))) / form
    if not (directory / "config.json").is_file():
        raise UsageError(
            f"this installation carries no bundled model ({form})", hint="install from the repository or its wheel"
        )
    return directory
