"""Error bands: how far measured rows lay from predictions of their kind.

The table is data (`bands.toml`): `perfmodel validate --write-bands` writes it from rows that no
constant was fitted on, and everything else reads it here. A band gives the ratios of measured to
predicted below and above which 5 % of such rows lay, and the middle half. What no evidence covers is
said to be extrapolated, and its band is widened by a factor that says where it comes from.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from perfmodel.errors import InputError

FILE = Path(__file__).with_name("bands.toml")
METRICS = ("tpot", "ttft")
LOADS = (("low", 8.0), ("middle", 64.0), ("high", math.inf))  # requests of the instance, up to


@dataclass(frozen=True)
class Band:
    """Ratios of measured to predicted in rows like this one.

    low, high: of 90 % of the rows (5 % below, 5 % above); low_half, high_half: of the middle half.
    typical and p90: absolute errors in %, median and 90th percentile. rows: how many.
    extrapolated: why no evidence covers the case; empty where some does.
    """

    metric: str
    regime: str
    rows: int
    typical: float
    p90: float
    low: float
    low_half: float
    high_half: float
    high: float
    extrapolated: str = ""


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def about() -> str:
    """What the bands rest on, in one line."""
    return str(_table()["about"])


def load_of(concurrency: float) -> str:
    """The load class of an instance with so many requests."""
    return next(name for name, up_to in LOADS if concurrency <= up_to)


def band(
    metric: str,
    *,
    mode: str,
    concurrency: float,
    model: str,
    chip: str,
    context_tokens: float,
    gpus: int,
) -> Band:
    """The band of `metric` ("tpot", "ttft") in `mode` ("agg", "disagg") for this load and case.

    concurrency: requests of one instance. context_tokens: the longest of a request.
    Raises InputError for another metric or mode.
    """
    table = _table()
    regime = f"{mode}/{load_of(concurrency)}"
    if metric not in METRICS or regime not in table.get(metric, {}):
        known = ", ".join(f"{m} in {r}" for m in METRICS for r in table.get(m, {}))
        raise InputError(f"band: {metric!r} in {regime!r} is unknown; known: {known}")
    row = table[metric][regime]
    seen, widen = table["covered"], table["widen"]
    why, factor = [], 1.0
    for name, missing, text in (
        ("chip", chip not in seen["chips"], f"no rows of {chip}"),
        ("model", model not in seen["models"], f"no rows of {model}"),
        (
            "context",
            context_tokens > seen["context_tokens"],
            f"context beyond {seen['context_tokens']:,} tokens",
        ),
        ("gpus", gpus > seen["gpus"], f"more than {seen['gpus']} GPUs"),
    ):
        if missing:
            why.append(text)
            factor = max(factor, widen[name])  # the widest applies: they overlap
    ratio = {k: row[k] ** factor for k in ("low", "low_half", "high_half", "high")}
    return Band(
        metric, regime, row["rows"], row["typical"] * factor, row["p90"] * factor, **ratio,
        extrapolated="; ".join(why),
    )  # fmt: skip


def write(table: dict[str, Any], path: Path = FILE) -> None:
    """Write the table as TOML, whole or not at all."""
    lines = [
        "# Written by `perfmodel validate --write-bands`; see perfmodel/bands.py.",
        f'about = "{table["about"]}"',
    ]
    for section in ("covered", "widen"):
        lines += ["", f"[{section}]"]
        lines += [f"{k} = {_toml(v)}" for k, v in table[section].items()]
    for metric in METRICS:
        for regime, row in table[metric].items():
            lines += ["", f'[{metric}."{regime}"]']
            lines += [f"{k} = {_toml(v)}" for k, v in row.items()]
    partial = path.with_suffix(".partial")
    partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
    tomllib.loads(partial.read_text(encoding="utf-8"))
    partial.replace(path)
    _table.cache_clear()


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(f'"{x}"' for x in value) + "]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
