"""`perfmodel validate`: the three rings together, their tables, files and bands."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd

import perfmodel
from perfmodel import bands
from perfmodel.errors import InputError
from perfmodel.paths import checkout
from perfmodel.predict import write_csv
from perfmodel.validation import kernels, phases, serving_rows, silicon
from perfmodel.validation.errors import error_table

ENVIRONMENT = "PERFMODEL_EVIDENCE"
MEASUREMENTS = "measurements.csv"
# How much wider rows of an unseen kind lie: P90 of TPOT errors left out of the fit, over the P90 of
# the whole fit, from `calibration/fit_serving.py --leave-out` (worst chip, worst model family).
# No evidence covers longer contexts or wider groups: the factor there is our own.
WIDEN = {"chip": 1.7, "model": 2.1, "context": 2.0, "gpus": 1.5}


@dataclass
class Result:
    """What the rings found; each table is ready to print or save."""

    tables: dict[str, pd.DataFrame] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    scored: pd.DataFrame = field(default_factory=pd.DataFrame)
    kernel_rows: pd.DataFrame = field(default_factory=pd.DataFrame)
    phase_rows: pd.DataFrame = field(default_factory=pd.DataFrame)


def find_evidence(folder: str | Path | None = None) -> Path | None:
    """The evidence folder: as given, from PERFMODEL_EVIDENCE, or beside the checkout; else None.

    Raises InputError when a folder was named and is not there.
    """
    named = folder or os.environ.get(ENVIRONMENT)
    if named:
        path = Path(named)
        if not path.is_dir():
            raise InputError(f"evidence: {str(path)!r} is not a folder")
        inner = path / "evidence"  # the folder that holds it will do as well
        return inner if inner.is_dir() else path
    root = checkout()
    beside = root.parent / "shared" / "evidence" if root else None
    return beside if beside is not None and beside.is_dir() else None


def validate(evidence: Path | None, sample: Path | None = None) -> Result:
    """Run every ring that there is data for. Raises InputError when there is none at all."""
    out = Result()
    sample = sample or silicon.find_sample()
    if evidence is None and sample is None:
        raise InputError(
            "validate: no evidence: name a folder with --evidence (or the variable "
            f"{ENVIRONMENT}), or install perfmodel[evidence] (aiconfigurator-core)"
        )
    _kernel_ring(out, evidence)
    _phase_ring(out, evidence)
    _serving_ring(out, evidence, sample)
    return out


def _kernel_ring(out: Result, evidence: Path | None) -> None:
    folder = evidence / "kernels" if evidence else None
    if folder is None or not folder.is_dir():
        out.notes.append("kernel ring: left out, there is no folder of kernel tables")
        return
    d = kernels.ring(folder)
    out.kernel_rows = d
    d = d.assign(measured=d["measured_s"], predicted=d["predicted_s"])
    out.tables["kernels"] = error_table(d, ["op", "chip"])
    out.tables["kernels by precision"] = error_table(d, ["op", "chip", "precision"])
    out.tables["kernels by regime"] = error_table(d, ["op", "regime"])
    out.notes += [f"kernel table {x.table}: left out: {x.reason}" for x in kernels.EXCLUDED]


def _phase_ring(out: Result, evidence: Path | None) -> None:
    path = evidence / MEASUREMENTS if evidence else None
    if path is None or not path.is_file():
        out.notes.append("phase ring: left out, there are no published operating points")
        return
    table = phases.read(path)
    parts = {
        "phases": phases.phases(table),
        "speculation": phases.speculation(table),
        "medians": phases.medians(table),
    }
    for name, d in parts.items():
        used = d[d["reason"] == ""]
        out.tables[name] = error_table(used, ["what"])
        left = d[d["reason"] != ""]
        out.notes += [
            f"{name}: {n} rows left out: {reason}"
            for reason, n in left["reason"].value_counts().items()
        ]
    out.phase_rows = pd.concat([d.assign(ring=k) for k, d in parts.items()], ignore_index=True)


def _serving_ring(out: Result, evidence: Path | None, sample: Path | None) -> None:
    has_rows = evidence is not None and (evidence / serving_rows.CALIBRATION).is_file()
    if not has_rows and sample is None:
        out.notes.append("serving ring: left out, there are no serving rows")
        return
    table, notes = serving_rows.read(evidence, sample)
    out.notes += notes
    every = []
    for variant in serving_rows.VARIANTS:
        scored = serving_rows.score(table, variant)
        t = serving_rows.tables(scored)
        if variant == "calibrated":
            out.scored = scored
            out.tables["serving"] = t
            out.tables["serving refused"] = serving_rows.refused(scored)
        whole = t[t["by"] == "all"].drop(columns=["by", "value"])
        whole.insert(0, "variant", variant)
        every.append(whole)
    out.tables["serving variants"] = pd.concat(every, ignore_index=True)


def save(result: Result, folder: Path) -> list[Path]:
    """Write every table, and the scored rows, as CSV into `folder` (made if missing)."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    tables = dict(result.tables)
    if not result.scored.empty:
        tables["serving rows"] = result.scored
    if not result.phase_rows.empty:
        tables["phase rows"] = result.phase_rows
    for name, t in tables.items():
        path = folder / f"{name.replace(' ', '_')}.csv"
        write_csv(t, path)
        files.append(path)
    return files


def write_bands(result: Result) -> None:
    """Write `bands.toml` from the acceptance rows. Raises InputError when there are none."""
    if result.scored.empty:
        raise InputError("bands: no serving rows were scored")
    now = datetime.now(UTC).date().isoformat()
    about = (
        f"aiconfigurator-core 0.12.0, silicon_sample.csv: deployments outside of the calibration, "
        f"scored with perfmodel {perfmodel.__version__} on {now}"
    )
    bands.write(serving_rows.band_table(result.scored, WIDEN, about))
