"""Error statistics: one definition for every ring."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from perfmodel.errors import InputError


def statistics(measured: pd.Series, predicted: pd.Series) -> dict[str, float]:
    """n, MdAPE, P90 and bias (median signed error), in %, over rows where both are numbers."""
    ratio = (predicted / measured).to_numpy(float)
    e = 100 * (ratio[np.isfinite(ratio)] - 1)
    if not e.size:
        return {"n": 0, "MdAPE": float("nan"), "P90": float("nan"), "bias": float("nan")}
    return {
        "n": int(e.size),
        "MdAPE": float(np.median(np.abs(e))),
        "P90": float(np.quantile(np.abs(e), 0.9)),
        "bias": float(np.median(e)),
    }


def error_table(
    df: pd.DataFrame,
    by: Sequence[str],
    measured: str = "measured",
    predicted: str = "predicted",
) -> pd.DataFrame:
    """`statistics` for each group of `by` (columns), as a table with those columns first.

    Raises InputError when the frame lacks a column.
    """
    missing = [c for c in (*by, measured, predicted) if c not in df.columns]
    if missing:
        raise InputError(f"error table: the frame lacks the columns {', '.join(missing)}")
    rows = []
    for key, part in df.groupby(list(by), sort=True, observed=True, dropna=False):
        names = dict(zip(by, key if isinstance(key, tuple) else (key,), strict=True))
        rows.append({**names, **statistics(part[measured], part[predicted])})
    return pd.DataFrame(rows, columns=[*by, "n", "MdAPE", "P90", "bias"])
