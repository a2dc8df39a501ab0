"""The exceptions a user can meet: what is wrong, where, and what to do.

Exit codes are the process's contract with CI: 0 PASS or ok, 1 FAIL, 2 usage or environment,
3 INCONCLUSIVE, 4 INVALID (a measurement that must not be read as a number).
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAIL = 1
EXIT_USAGE = 2
EXIT_INCONCLUSIVE = 3
EXIT_INVALID = 4


class Exl3EvalError(Exception):
    """A problem the user can fix. Printed as one line plus a hint, never as a traceback.

    Parameters
    ----------
    message : str
        What is wrong and where (file, tensor, field), seen against expected.
    hint : str
        What to do about it.
    """

    exit_code = EXIT_USAGE

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class UsageError(Exl3EvalError):
    """A wrong argument, or something missing from this machine."""


class CheckpointError(Exl3EvalError):
    """A model directory that cannot be read as what it claims to be."""


class SuiteError(Exl3EvalError):
    """Contexts that are missing, altered, too short or contaminated."""


class InvalidRunError(Exl3EvalError):
    """The run happened but its result must not be read as a number (exit code 4)."""

    exit_code = EXIT_INVALID
