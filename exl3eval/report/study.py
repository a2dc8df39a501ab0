"""The runs of one report: labelled, grouped by lane, held to one protocol, and the superseded ones set apart."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from exl3eval.errors import InvalidRunError, UsageError
from exl3eval.records import digest_value, read_json
from exl3eval.report.candidates import CandidateLists, read_candidates
from exl3eval.verify import first_difference, verify_run

VERDICT_FILE = "verdict.json"
VERDICT_SCHEMA = "exl3eval/verdict/1"
BASELINE, VARIANT, FLOOR, CONTROL = "baseline", "variant", "floor", "control"
GRAPH_CONTROL = "graph_control"
UNQUANTIZED_CACHES = (None, "activation dtype")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """A verified run.

    Attributes
    ----------
    folder : Path
        Where it was read from; never printed.
    receipt : mapping
    rows : mapping of str to Table
        Positions by arm.
    verdict : mapping or None
        What a gate decided on this very run.
    candidates : mapping
        Most likely tokens by (arm, context, position), where the run stored them.
    """

    folder: Path
    receipt: Mapping[str, Any]
    rows: Mapping[str, pa.Table]
    verdict: Mapping[str, Any] | None = None
    candidates: CandidateLists = field(default_factory=dict)

    @property
    def identity(self) -> Mapping[str, Any]:
        """Everything that may have moved the numbers."""
        return self.receipt["identity"]

    @property
    def results(self) -> Mapping[str, Any]:
        """Every number."""
        return self.receipt["results"]

    @property
    def paired(self) -> Mapping[str, Any]:
        """Variant minus baseline."""
        return self.results["comparison"]["paired"]

    @property
    def baseline(self) -> str:
        """Name of the arm on the left of the difference."""
        return self.receipt["baseline"]

    @property
    def variant(self) -> str:
        """Name of the arm on the right of the difference."""
        return self.receipt["variant"]

    @property
    def floor(self) -> str:
        """Name of the reference at its other precision."""
        return self.receipt["floor"]

    @property
    def control(self) -> str | None:
        """Name of the reference in the lane under test; None in prefill."""
        control = self.results["floors"].get("lane_control")
        return control["arm"] if control else None

    @property
    def graph_control(self) -> str | None:
        """Name of the reference in the variant's replayed lane; None unless it differs from the baseline's."""
        control = self.results["floors"].get("graph_control")
        return control["arm"] if control else None

    @property
    def first_scored(self) -> int:
        """Position at which scoring begins in every context."""
        return self.identity["tokens"].get("first_scored", 0)

    @property
    def lane(self) -> str:
        """Which forward passes were scored, in words."""
        identity = self.identity
        parts = [identity["lane"]]
        if identity["graphs"]:
            parts.append("graphs")
        if identity["kv_cache"] not in UNQUANTIZED_CACHES:
            parts.append(f"KV {identity['kv_cache']}")
        return ", ".join(parts)

    @property
    def interval_name(self) -> str:
        """Heading of a column of intervals."""
        return f"{self.receipt['resampling']['confidence']:.0%} interval".replace("%", " %")

    @property
    def digest(self) -> str:
        """Digest of the results."""
        return self.receipt["results_digest"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arm:
    """One row of the headline: an arm of a run, or of several whose figures are the same."""

    label: str
    role: str
    run: Run
    name: str

    @property
    def summary(self) -> Mapping[str, Any]:
        """Its figures."""
        return self.run.results["arms"][self.name]

    @property
    def rows(self) -> pa.Table:
        """Its positions."""
        return self.run.rows[self.name]

    def tail(self, name: str) -> Mapping[str, Any]:
        """One tail figure."""
        return next(tail for tail in self.summary["tails"] if tail["name"] == name)

    def optional(self, section: str) -> Mapping[str, Any] | None:
        """What `results` says about this arm under a name that not every receipt has."""
        return (self.run.results.get(section) or {}).get(self.name)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Superseded:
    """A run whose question a later run answers again."""

    old: Run
    new: Run


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Study:
    """Everything that a report is made from."""

    runs: tuple[Run, ...]
    superseded: tuple[Superseded, ...] = ()
    model_name: str | None = None
    texts: dict[int, str] = field(default_factory=dict)

    @property
    def lanes(self) -> tuple[str, ...]:
        """Lanes, prefill first, then by rows: one axis never holds two."""
        return tuple(sorted({run.lane for run in self.runs}, key=_lane_order))

    def in_lane(self, lane: str) -> tuple[Run, ...]:
        """Runs of one lane."""
        return tuple(run for run in self.runs if run.lane == lane)

    def title(self, run: Run) -> str:
        """Name a run where several lanes may stand side by side."""
        return self.label(run) if len(self.lanes) == 1 else f"{self.label(run)}, {run.lane} lane"

    def label(self, run: Run) -> str:
        """Name a run by its variant; runs of one lane that share it are told apart by their results' digest."""
        shared = [other for other in self.in_lane(run.lane) if other.variant == run.variant]
        return run.variant if len(shared) == 1 else f"{run.variant} ({run.digest[:8]})"

    def arms(self, lane: str) -> tuple[Arm, ...]:
        """Arms of one lane: baselines, variants, floors, controls; equal arms of several runs once."""
        found: dict[tuple[str, str], Arm] = {}
        for role in (BASELINE, VARIANT, FLOOR, CONTROL, GRAPH_CONTROL):
            for run in self.in_lane(lane):
                if (name := getattr(run, role)) is None:
                    continue
                arm = Arm(label=name, role=role, run=run, name=name)
                found.setdefault((name, digest_value([arm.summary, run.identity["arms"][name]])), arm)
        names = [name for name, _ in found]
        return tuple(
            arm if names.count(name) == 1 else Arm(label=f"{name} ({key[:8]})", role=arm.role, run=arm.run, name=name)
            for (name, key), arm in found.items()
        )


def load_study(folders: Sequence[Path], *, model_name: str | None = None, executor: Executor | None = None) -> Study:
    """Verify runs and arrange them.

    Raises
    ------
    UsageError
        If a folder holds no run, one run is given twice, or the runs are not of one protocol.
    InvalidRunError
        If a run or its verdict fails verification.
    """
    runs: list[Run] = []
    for folder in folders:
        receipt, rows = verify_run(folder, executor=executor)
        runs.append(
            Run(
                folder=folder,
                receipt=receipt,
                rows=rows,
                verdict=_read_verdict(folder, receipt),
                candidates=read_candidates(folder, receipt, rows),
            )
        )
    return arrange(runs, model_name=model_name)


def arrange(runs: Sequence[Run], *, model_name: str | None = None) -> Study:
    """Hold runs to one protocol and set the superseded ones apart.

    Raises
    ------
    UsageError
        If there is no run, one is given twice, or the runs are not of one protocol.
    """
    if not runs:
        raise UsageError("no run was given", hint="give folders written by `exl3eval kld --out`")
    seen: dict[str, Run] = {}
    for run in runs:
        if twice := seen.get(run.receipt["identity_digest"] + run.digest):
            raise UsageError(f"the run of `{twice.variant}` is given twice", hint="give each run once")
        seen[run.receipt["identity_digest"] + run.digest] = run
    first, *others = runs
    for other in others:
        if difference := first_difference(_protocol(first), _protocol(other), "protocol"):
            raise UsageError(
                f"the runs of `{first.variant}` and `{other.variant}` follow different protocols: {difference}",
                hint="one axis, one protocol: report runs over other tokens or another reference apart",
            )
    _check_scored(runs)
    newest: dict[str, Run] = {}
    for run in sorted(runs, key=lambda run: run.receipt["created"]):
        newest[_question(run)] = run
    return Study(
        runs=tuple(
            sorted((run for run in runs if newest[_question(run)] is run), key=lambda run: _lane_order(run.lane))
        ),
        superseded=tuple(
            Superseded(old=run, new=newest[_question(run)]) for run in runs if newest[_question(run)] is not run
        ),
        model_name=model_name,
    )


def _check_scored(runs: Sequence[Run]) -> None:
    """Runs of one kind of lane share axes, so they score the same positions."""
    kinds: dict[str, Run] = {}
    for run in runs:
        first = kinds.setdefault(run.identity["lane"].split("[")[0], run)
        if first.first_scored != run.first_scored:
            raise UsageError(
                f"lane {first.lane} is scored from position {first.first_scored}, {run.lane} from {run.first_scored}",
                hint="report them apart, or run both with the same --decode-positions",
            )


def _protocol(run: Run) -> dict[str, Any]:
    """What must agree before two figures share an axis; the lane is the axis's own."""
    identity = run.identity
    fields = ("suite", "tokens", "vocabulary", "reference_precision", "engine")
    reference = identity["arms"][run.receipt["reference"]]["checkpoint_sha256"]
    shared = {name: identity[name] for name in fields}
    shared["tokens"] = {name: value for name, value in shared["tokens"].items() if name != "first_scored"}
    return shared | {"reference_checkpoint_sha256": reference}


def _question(run: Run) -> str:
    """Digest what was asked: a later run that asks the same, on the same device, answers it anew."""
    arms = run.identity["arms"]
    asked = {name: {key: arms[name][key] for key in ("checkpoint_sha256", "declared")} for name in arms}
    return digest_value([run.lane, run.baseline, run.variant, run.identity["device"]["name"], asked, _protocol(run)])


def _read_verdict(folder: Path, receipt: Mapping[str, Any]) -> Mapping[str, Any] | None:
    if not (folder / VERDICT_FILE).exists():
        return None
    record = read_json(folder / VERDICT_FILE)
    schema = record.get("schema") if isinstance(record, dict) else None
    hint = "judge the run again, or remove the file"
    if schema != VERDICT_SCHEMA:
        raise InvalidRunError(f"{VERDICT_FILE} has schema {schema!r}, expected {VERDICT_SCHEMA!r}", hint=hint)
    digests = [run["results_digest"] for run in record["runs"]]
    if receipt["results_digest"] not in digests:
        raise InvalidRunError(f"{VERDICT_FILE} judges other results than {receipt['results_digest'][:16]}", hint=hint)
    mean = receipt["results"]["comparison"]["paired"]["delta"]["mean"]
    for endpoint in record["verdict"]["endpoints"]:
        delta = endpoint["delta"]
        judged = (delta["variant"], delta["endpoint"]) == (receipt["variant"], "mean")
        if judged and (found := first_difference(delta["value"], mean, "the mean difference")):
            raise InvalidRunError(f"{VERDICT_FILE} rests on other numbers: {found}", hint=hint)
    return record


def _lane_order(lane: str) -> tuple[bool, str, int, str]:
    kind, _, rest = lane.partition("[")
    rows = re.match(r"\d+", rest)
    return kind != "prefill", kind, int(rows[0]) if rows else 0, lane


def decode_rows(lane: str) -> int | None:
    """Return M of a lane named `decode[M]`, None of any other."""
    found = re.match(r"decode\[(\d+)\]", lane)
    return int(found[1]) if found else None
