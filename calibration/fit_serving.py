"""Fit the serving constants over measured rows, and say what a left-out model or chip costs.

    python calibration/fit_serving.py ROWS.csv [--leave-out]

ROWS.csv has the columns of `perfmodel.rows` and the measured `ttft_mean_ms` and `tpot_mean_ms`. The
constants are those of the engine and protocol cards, the variance of the experts' popularity
(assumptions) and the tile padding (machine cards): one value each for all models and chips. Kernel
efficiencies are not fitted here: they come from `fit_kernels.py`. Errors are absolute logarithms,
smoothed near zero, so that no single row pulls. With --leave-out the fit is repeated without each
model family and without each chip, and scored on what it did not see.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from perfmodel import rows
from perfmodel.engine import Engine, Protocol
from perfmodel.request import layout
from perfmodel.roofline import machine_numbers
from perfmodel.serving import solve

ENGINES = ("trtllm", "vllm", "sglang")
# What is fitted: name -> (first guess, lowest, highest). `x_` multiplies a machine number.
PER_ENGINE = {
    "kernel_scale": (1.2, 0.3, 4.0),
    "prefill_scale": (1.3, 0.5, 5.0),
    "prefill_kernel": (30e-6, 0.0, 300e-6),
    "request": (50e-3, 0.0, 1.0),
}
SHARED = {
    "decode_only": (0.75, 0.3, 1.0),
    "sequence": (25e-6, 0.0, 200e-6),
    "deferred": (0.5, 0.0, 1.0),  # SGLang's: it prefills first; the others mix
    "wave": (0.15, 0.0, 1.0),
    "nu": (2.0, 0.01, 10.0),
    "tau_tile_rows": (76.0, 0.0, 300.0),
}
NAMES = [f"{n}_{e}" for n in PER_ENGINE for e in ENGINES] + list(SHARED)
TPOT_WEIGHT, TTFT_WEIGHT = 1.0, 0.5  # TTFT is noisier: repeats differ three times as much


class Groups:
    """Rows of one model and precision each, with everything but the fitted constants evaluated."""

    def __init__(self, table: pd.DataFrame) -> None:
        self.groups = []
        checked: dict[tuple[str, str], list[tuple[int, rows.Row]]] = {}
        for i, row in enumerate(table.to_dict("records")):
            r = rows.check(row)
            checked.setdefault((r.model.id, r.precision), []).append((i, r))
        for pairs in checked.values():
            ids, some = [i for i, _ in pairs], [r for _, r in pairs]
            model = some[0].model
            machine = rows.stack(
                [
                    {k: v for k, (v, _) in machine_numbers(r.system, "calibrated").items()}
                    | {"capacity": rows.capacity(r.system)}
                    for r in some
                ]
            )
            plans = (
                rows.stack([layout(r.plan, model) for r in some]),
                rows.stack([layout(r.prefill_plan, model) for r in some]),
            )
            self.groups.append((ids, some, machine, plans, rows.load(some)))
        self.tpot = table["tpot_mean_ms"].to_numpy() / 1e3
        self.ttft = table["ttft_mean_ms"].to_numpy() / 1e3

    def errors(self, x: Mapping[str, float]) -> tuple[np.ndarray, np.ndarray]:
        """Logarithms of predicted over measured TPOT and TTFT, in the order of the table."""
        tpot, ttft = np.full(self.tpot.size, np.nan), np.full(self.tpot.size, np.nan)
        engines = {e: _engine(e, x) for e in ENGINES}
        protocols = {p: _protocol(p, x) for p in ("inferencex", "fixed")}
        for ids, some, machine, (decode, prefill), load in self.groups:
            v = solve(
                some[0].model, some[0].precision, machine,
                [engines[r.engine.id] for r in some], [protocols[r.protocol.id] for r in some],
                decode, prefill, load,
                overrides={
                    "nu": x["nu"],
                    "tau_tile_rows": x["tau_tile_rows"],
                },
            )  # fmt: skip
            fits = v["spare_bytes"] >= 0
            tpot[ids], ttft[ids] = (
                np.where(fits, v["tpot"], np.nan),
                np.where(fits, v["ttft"], np.nan),
            )
        return np.log(tpot / self.tpot), np.log(ttft / self.ttft)


def _engine(name: str, x: Mapping[str, float]) -> Engine:
    card = rows.load_engine(name)
    new = {n: x[f"{n}_{name}"] for n in PER_ENGINE} | {n: x[n] for n in ("decode_only", "sequence")}
    new["deferred"] = x["deferred"] if name == "sglang" else 0.0
    values = {k: getattr(card.values, k).model_copy(update={"value": v}) for k, v in new.items()}
    return card.model_copy(update={"values": card.values.model_copy(update=values)})


def _protocol(name: str, x: Mapping[str, float]) -> Protocol:
    card = rows.load_protocol(name)
    wave = card.values.wave.model_copy(update={"value": x["wave"]})
    return card.model_copy(update={"values": card.values.model_copy(update={"wave": wave})})


def bounds() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    table = [PER_ENGINE[n] for n in PER_ENGINE for _ in ENGINES] + list(SHARED.values())
    first, low, high = (np.array(c) for c in zip(*table, strict=True))
    return first, low, high


def fit(
    groups: Groups, keep: np.ndarray, start: np.ndarray | None = None, rounds: int = 25
) -> np.ndarray:
    """Constants that minimise the smoothed absolute log error over the rows of `keep`.

    Damped Gauss-Newton steps on a reweighted least-squares problem; numerical derivatives.
    """
    first, low, high = bounds()
    x = first if start is None else start.copy()
    scale = np.maximum(first, 1e-9)

    def residuals(z: np.ndarray) -> np.ndarray:
        tpot, ttft = groups.errors(dict(zip(NAMES, z, strict=True)))
        r = np.concatenate((TPOT_WEIGHT * tpot[keep], TTFT_WEIGHT * ttft[keep]))
        return np.clip(np.nan_to_num(r), -3, 3)

    def cost(r: np.ndarray) -> float:
        return float(np.sum(np.sqrt(1 + (r / 0.08) ** 2) - 1))

    r, damping = residuals(x), 1e-2
    best = cost(r)
    for _ in range(rounds):
        columns = []
        for j in range(x.size):
            step = 0.01 * scale[j] * (-1 if x[j] + 0.01 * scale[j] > high[j] else 1)
            y = x.copy()
            y[j] += step
            columns.append((residuals(y) - r) / (step / scale[j]))
        a = np.stack(columns, axis=1)
        w = 1 / np.sqrt(1 + (r / 0.08) ** 2)
        h, g = a.T @ (a * w[:, None]), a.T @ (w * r)
        for _ in range(6):
            free = np.linalg.solve(h + damping * np.diag(np.diag(h) + 1e-9), -g) * scale
            y = np.clip(x + free, low, high)
            ry = residuals(y)
            if cost(ry) < best:
                damping = max(damping / 5, 1e-6)
                break
            damping *= 5
        else:
            break
        gain, x, r, best = best - cost(ry), y, ry, cost(ry)
        if gain < 1e-3 * best:
            break
    return x


def score(log_error: np.ndarray) -> str:
    e = log_error[np.isfinite(log_error)]
    if not e.size:
        return "none"
    ape = 100 * np.abs(np.exp(e) - 1)
    return (
        f"n {e.size:5d}  MdAPE {np.median(ape):5.1f}  P90 {np.quantile(ape, 0.9):6.1f}  "
        f"bias {100 * (np.exp(np.median(e)) - 1):+6.1f}"
    )


def _both(
    label: str, errors: tuple[np.ndarray, np.ndarray], keep: np.ndarray, agg: np.ndarray
) -> None:
    for what, e in zip(("TPOT", "TTFT"), errors, strict=True):
        for mode, m in (("agg", agg), ("disagg", ~agg)):
            if (keep & m).any():
                print(f"{label:24s} {what} {mode:7s} {score(e[keep & m])}")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("rows", type=Path)
    parser.add_argument("--leave-out", action="store_true")
    args = parser.parse_args(argv)
    table = rows.read(args.rows)
    agg = (table["mode"] == "agg").to_numpy()
    groups = Groups(table)
    every = np.ones(len(table), bool)
    first = bounds()[0]
    _both("first guess", groups.errors(dict(zip(NAMES, first, strict=True))), every, agg)
    x = fit(groups, every)
    for name, value in zip(NAMES, x, strict=True):
        print(f"{name:24s} {value:.4g}")
    _both("fitted", groups.errors(dict(zip(NAMES, x, strict=True))), every, agg)
    if args.leave_out:
        for column in ("model_path", "system"):
            for left in sorted(table[column].unique()):
                out = (table[column] == left).to_numpy()
                y = fit(groups, ~out, x, rounds=8)
                _both(
                    f"without {left}"[:24],
                    groups.errors(dict(zip(NAMES, y, strict=True))),
                    out,
                    agg,
                )


if __name__ == "__main__":
    main(sys.argv[1:])
