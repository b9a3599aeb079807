"""Ring 3 of the validation: measured serving rows beside predictions of the same deployments.

Two sets. `calibration`: the rows that the serving constants were fitted on
(`serving_calibration.csv` of an evidence folder). `acceptance`: rows of other deployments, from the
optional package aiconfigurator-core (Apache-2.0), whose `silicon_sample.csv` is cleaned by
`perfmodel.validation.silicon`. Only the second says how good the model is.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from perfmodel import bands, rows
from perfmodel.errors import InputError
from perfmodel.validation import silicon
from perfmodel.validation.errors import error_table

CALIBRATION = "serving_calibration.csv"
VARIANTS = {
    "calibrated": "all constants as shipped",
    "nothing fitted": "kernel tables only: no constant from serving rows",
    "speed of light": "data-sheet peaks, no floors",
}
METRICS = {"TPOT": ("tpot_mean_ms", "tpot"), "TTFT": ("ttft_mean_ms", "ttft"),
           "throughput": ("output_rate_measured", "output_rate")}  # fmt: skip


def read(evidence: Path | None, sample: Path | None) -> tuple[pd.DataFrame, list[str]]:
    """Rows with a column `set`, and notes on what is missing or was dropped.

    evidence: a folder with the calibration rows; sample: `silicon_sample.csv`. Raises InputError
    when neither is there.
    """
    notes, parts = [], []
    calibration = pd.DataFrame()
    if evidence is not None and (evidence / CALIBRATION).is_file():
        calibration = rows.read(evidence / CALIBRATION)
        parts.append(calibration.assign(set="calibration"))
    else:
        notes.append("calibration rows: no evidence folder, so they are not scored")
    if sample is not None:
        clean, report = silicon.clean_with_report(sample)
        notes.append(report.text())
        if calibration.empty:
            notes.append(
                "acceptance rows: without the calibration rows they cannot be told apart, so all "
                "rows are scored together"
            )
            parts.append(clean.assign(set="all rows"))
        else:
            other = silicon.acceptance(clean, calibration)
            parts.append(other.assign(set="acceptance"))
    else:
        notes.append(
            "acceptance rows: the package aiconfigurator-core is not installed "
            "(pip install 'perfmodel[evidence]')"
        )
    if not parts:
        raise InputError("validate: no serving rows; " + "; ".join(notes))
    return pd.concat(parts, ignore_index=True), notes


def score(table: pd.DataFrame, variant: str = "calibrated") -> pd.DataFrame:
    """The rows with predictions: `evaluate`'s columns, and the measured output rate.

    Throughput at a fixed concurrency is Little's law over the measured times.
    """
    out = rows.evaluate(table, **_variant(variant))
    clash = [c for c in out.columns if c in table.columns]
    d = table.drop(columns=clash).join(out)
    lengths = d["output_tokens"]
    life = (d["ttft_mean_ms"] + lengths * d["tpot_mean_ms"]) / 1e3
    d["output_rate_measured"] = d["concurrency"] * lengths / life
    d["regime"] = pd.cut(
        d["concurrency"] / d["attention_dp"].clip(lower=1), [0, 1, 8, 63.999, np.inf],
        labels=["batch 1", "C <= 8", "8 < C < 64", "C >= 64"],
    ).astype(str)  # fmt: skip
    d["load"] = [bands.load_of(c) for c in d["concurrency"]]
    d["workload"] = np.where(
        d["isl"] >= 4 * d["osl"], "long prompt",
        np.where(d["osl"] >= 4 * d["isl"], "long output", "even"),
    )  # fmt: skip
    for measured, predicted in METRICS.values():
        if measured.endswith("_ms"):
            d[f"{predicted}_s_measured"] = d[measured] / 1e3
        else:
            d[f"{predicted}_s_measured"] = d[measured]
    return d


def _variant(name: str) -> dict[str, Any]:
    if name == "calibrated":
        return {}
    if name == "speed of light":
        return {"mode": "speed-of-light"}
    if name == "nothing fitted":
        return {"engine": "kernels", "overrides": {"nu": 1e-6, "tau_tile_rows": 76.0}}
    raise InputError(f"variant: {name!r} is unknown; expected one of {', '.join(VARIANTS)}")


GROUPINGS = ((), ("chip",), ("model",), ("engine",), ("regime",), ("workload",))


def tables(scored: pd.DataFrame) -> pd.DataFrame:
    """Errors by set, mode and each grouping: columns set, metric, mode, by, value, n, ..."""
    out = []
    for metric, (_, predicted) in METRICS.items():
        d = scored.assign(measured=scored[f"{predicted}_s_measured"], predicted=scored[predicted])
        for by in GROUPINGS:
            t = error_table(d, ["set", "mode", *by])
            t.insert(0, "metric", metric)
            t.insert(3, "by", by[0] if by else "all")
            t.insert(4, "value", t.pop(by[0]) if by else "all")
            out.append(t)
    return pd.concat(out, ignore_index=True)


def refused(scored: pd.DataFrame) -> pd.DataFrame:
    """Rows that the model refuses, counted by set and reason (numbers left out of the reason)."""
    d = scored[scored["reason"] != ""]
    reason = d["reason"].str.replace(r" with .*", "", regex=True)
    return d.assign(reason=reason).groupby(["set", "reason"]).size().rename("n").reset_index()


def band_table(scored: pd.DataFrame, widen: dict[str, float], about: str) -> dict[str, Any]:
    """The table of `perfmodel.bands` from the acceptance rows of `scored`."""
    d = scored[(scored["set"] == "acceptance") & (scored["reason"] == "")]
    if d.empty:
        raise InputError("bands: no acceptance rows; install perfmodel[evidence]")
    every = scored[scored["reason"] == ""]
    table: dict[str, Any] = {
        "about": about,
        "covered": {
            "chips": sorted(every["chip"].unique()),
            "models": sorted(every["model"].unique()),
            "context_tokens": int((every["isl"] + every["osl"]).max()),
            "gpus": int(every["n_gpus"].max()),
        },
        "widen": widen,
    }
    for metric in bands.METRICS:
        table[metric] = {
            f"{mode}/{load}": _quantiles(part[f"{metric}_s_measured"] / part[metric])
            for (mode, load), part in d.groupby(["mode", "load"], sort=True)
        }
    return table


def _quantiles(ratio: Iterable[float]) -> dict[str, float]:
    r = np.asarray(list(ratio), float)
    e = 100 * np.abs(1 / r - 1)
    low, low_half, high_half, high = np.quantile(r, [0.05, 0.25, 0.75, 0.95])
    return {
        "rows": int(r.size), "typical": float(np.median(e)), "p90": float(np.quantile(e, 0.9)),
        "low": float(low), "low_half": float(low_half), "high_half": float(high_half),
        "high": float(high),
    }  # fmt: skip
