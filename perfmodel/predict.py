"""Predictions for benchmark rows: TTFT and TPOT with their bands, the bound, and why not."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from perfmodel import bands, rows
from perfmodel.errors import InputError

ADDED = (
    "ttft_mean_ms_pred", "ttft_mean_ms_low", "ttft_mean_ms_high",
    "tpot_mean_ms_pred", "tpot_mean_ms_low", "tpot_mean_ms_high",
    "bound", "extrapolated", "reason",
)  # fmt: skip
BOUNDS = ("compute", "memory", "link", "floor")


def predict(table: pd.DataFrame, mode: str = "calibrated") -> pd.DataFrame:
    """The rows with the columns ADDED: times in ms, `low` and `high` of 90 % of rows of their kind.

    `bound` is the largest part of the decode step, or `prefill` where waits for prefills between
    tokens outweigh the step. A refused row has a `reason` and no numbers. Columns of these names
    that the table already has are replaced. Raises InputError when a needed column is missing.
    """
    v = rows.evaluate(table, mode)
    out = table.drop(columns=[c for c in ADDED if c in table.columns])
    notes = []
    limits: dict[str, list[float]] = {}
    done = v.to_dict("records")
    for row, got in zip(table.to_dict("records"), done, strict=True):
        ok = got["reason"] == ""
        found = {m: _band(m, row, got) if ok else None for m in bands.METRICS}
        for metric, b in found.items():
            x = float(got[metric]) if ok else float("nan")
            limits.setdefault(f"{metric}_low", []).append(1e3 * x * (b.low if b else 1))
            limits.setdefault(f"{metric}_high", []).append(1e3 * x * (b.high if b else 1))
        first = found["tpot"]
        notes.append(first.extrapolated if first else "")
    for metric in ("ttft", "tpot"):
        out[f"{metric}_mean_ms_pred"] = 1e3 * v[metric]
        for side in ("low", "high"):
            out[f"{metric}_mean_ms_{side}"] = limits[f"{metric}_{side}"]
    out["bound"] = _bounds(v)
    out["extrapolated"] = notes
    out["reason"] = v["reason"]
    return out


def _band(metric: str, row: Mapping[Any, Any], v: Mapping[Any, Any]) -> bands.Band:
    return bands.band(
        metric,
        mode="disagg" if row.get("mode") == "disagg" else "agg",
        concurrency=float(row["concurrency"]),
        model=str(v["model"]),
        chip=str(v["chip"]),
        context_tokens=float(row["isl"]) + float(row["osl"]),
        gpus=int(row["n_gpus"]),
    )


def _bounds(v: pd.DataFrame) -> pd.Series:
    if "sum_compute" not in v.columns:  # every row was refused
        return pd.Series("", index=v.index, dtype=object)
    ok = v["reason"] == ""
    parts = v[[f"sum_{b}" for b in BOUNDS]].to_numpy(float)
    largest = np.asarray(BOUNDS)[np.nan_to_num(parts).argmax(axis=1)]
    largest = np.where(v["stall"] > v["step_time"], "prefill", largest)
    return pd.Series(np.where(ok, largest, ""), index=v.index, dtype=object)


def predict_file(source: str | Path, target: str | Path, mode: str = "calibrated") -> pd.DataFrame:
    """Read `source` (CSV), predict, and write `target` (CSV) whole or not at all.

    Raises InputError for bad files; the target's folder must be there.
    """
    path = Path(target)
    if not path.parent.is_dir():
        raise InputError(f"output: the folder {str(path.parent)!r} is not there; create it first")
    if path.is_dir():
        raise InputError(f"output: {str(path)!r} is a folder; expected a file to write")
    out = predict(rows.read(source), mode)
    write_csv(out, path)
    return out


def write_csv(table: pd.DataFrame, path: Path) -> None:
    """Write a table as CSV to a temporary file beside `path`, then rename it."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".partial-", suffix=".csv")
        try:
            with os.fdopen(handle, "w", encoding="utf-8", newline="") as f:
                table.to_csv(f, index=False)
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as e:
        raise InputError(f"output: {str(path)!r} can't be written: {e.strerror or e}") from None
